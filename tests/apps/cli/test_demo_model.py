"""The demo's model: everything follows from the seed, the gradient is right, and it learns."""

import numpy as np
import pytest

from potluck.apps.cli.demo_model import Array, Model, spirals


def total_loss(model: Model, points: Array, labels: Array) -> float:
    """The summed loss."""
    return model.gradient(points, labels, np.empty(model.size, points.dtype))


def test_the_seed_decides_everything() -> None:
    """All ranks make the same data and the same first parameters on their own."""
    assert all(map(np.array_equal, spirals(50, seed=3), spirals(50, seed=3)))
    assert not np.array_equal(spirals(50, seed=3)[0], spirals(50, seed=4)[0])
    assert np.array_equal(Model(seed=3).state, Model(seed=3).state)
    assert not np.array_equal(Model(seed=3).state, Model(seed=4).state)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """Compared with what a small change of each parameter does."""
    points, labels = spirals(8, seed=1, dtype=np.float64)
    model = Model(seed=1, hidden=4, dtype=np.float64)
    gradient = np.empty(model.size)
    model.gradient(points, labels, gradient)
    parameters = model.state[0]
    slopes = np.empty(model.size)
    for index in range(model.size):
        before = parameters[index]
        sides = []
        for change in (1e-6, -1e-6):
            parameters[index] = before + change
            sides.append(total_loss(model, points, labels))
        parameters[index] = before
        slopes[index] = (sides[0] - sides[1]) / 2e-6
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-7)


def test_shards_add_up_to_the_whole() -> None:
    """What the ranks compute for their own points sums to the gradient for all."""
    points, labels = spirals(30, seed=2, dtype=np.float64)
    model = Model(seed=2, hidden=4, dtype=np.float64)
    whole = np.empty(model.size)
    loss = model.gradient(points, labels, whole)
    total, total_of_losses = np.zeros(model.size), 0.0
    for rank in range(4):
        part = np.empty(model.size)
        total_of_losses += model.gradient(points[rank::4], labels[rank::4], part)
        total += part
    np.testing.assert_allclose(total, whole, rtol=1e-12)
    assert total_of_losses == pytest.approx(loss)


def test_it_learns() -> None:
    """Steps against the gradient lower the loss and raise the accuracy on other points."""
    points, labels = spirals(400, seed=5)
    unseen = spirals(200, seed=6)
    model = Model(seed=5, hidden=32)
    gradient = np.empty(model.size, np.float32)
    losses = []
    first_accuracy = model.accuracy(*unseen)
    for _ in range(600):
        losses.append(model.gradient(points, labels, gradient))
        model.update(gradient / np.float32(400))
    assert model.tree["steps"].tolist() == [600]
    assert losses[-1] < losses[0] / 2
    assert model.accuracy(*unseen) > first_accuracy


def test_the_loss_of_a_batch_is_that_of_its_points() -> None:
    """The mean loss at the end is measured like the loss on the way."""
    points, labels = spirals(40, seed=3)
    model = Model(seed=3, hidden=8)
    assert model.loss(points, labels) == pytest.approx(total_loss(model, points, labels) / 40)


def test_one_bit_changes_the_fingerprint() -> None:
    """Equal fingerprints mean equal parameters."""
    one, other = Model(seed=3, hidden=4), Model(seed=3, hidden=4)
    assert one.fingerprint == other.fingerprint
    other.state[0][-1] = np.nextafter(other.state[0][-1], np.float32(1))
    assert one.fingerprint != other.fingerprint


def test_a_confident_mistake_overflows_nothing() -> None:
    """A huge score is still a finite loss."""
    points, labels = spirals(4, seed=1)
    model = Model(seed=1, hidden=4)
    model.state[0] = 1e4
    gradient = np.empty(model.size, np.float32)
    with np.errstate(over="ignore"):
        loss = model.gradient(points, labels, gradient)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
