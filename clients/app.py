"""The Flower ClientApp of a site. It maps each message type to the function that answers it."""

from flwr.clientapp import ClientApp

from fedloom.clients.work import answer, identify

app = ClientApp()
app.query()(identify)
app.query("ask")(answer)
app.train()(answer)
