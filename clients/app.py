"""The Flower ClientApp of a site: which function answers which message."""

from flwr.clientapp import ClientApp

from fedloom.clients.work import answer, identify

app = ClientApp()
app.query()(identify)
app.query("ask")(answer)
app.train()(answer)
