"""FedAvg as a stock Flower app: Flower's own strategy, a plain loop of torch, nothing of this project."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

client = ClientApp()
server = ServerApp()


def network(widths: list[int], inputs: int, classes: int) -> nn.Sequential:
    """Return an MLP: linear layers with ReLU between them."""
    sizes = itertools.pairwise([inputs, *widths, classes])
    layers = [layer for before, after in sizes for layer in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train for some epochs of SGD on the site's own images."""
    job = json.loads(str(context.run_config["job"]))
    torch.set_num_threads(job["threads"])
    with np.load(f"{job['data']}/{context.node_config['site']}.npz") as arrays:
        images, labels = torch.from_numpy(arrays["x_train"]).unsqueeze(1).float() / 255, torch.from_numpy(arrays["y_train"])
    model = network(job["widths"], images[0].numel(), job["classes"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    optimiser = torch.optim.SGD(model.parameters(), lr=job["rate"], momentum=job["momentum"])
    losses = []
    for _ in range(job["epochs"]):
        for batch in torch.randperm(len(images)).split(job["batch"]):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    metrics = MetricRecord({"train_loss": sum(losses) / len(losses), "num-examples": len(images)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg's rounds; write the time at the end of each into a file."""
    job, ends = json.loads(str(context.run_config["job"])), []

    def ended(round: int, arrays: ArrayRecord) -> None:
        ends.append(time.time())
        Path(job["ends"]).write_text(json.dumps(ends), encoding="utf-8")

    sites = job["sites"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    start = ArrayRecord(network(job["widths"], job["inputs"], job["classes"]).state_dict())
    strategy.start(grid, start, job["rounds"], evaluate_fn=ended)  # type: ignore[arg-type]
