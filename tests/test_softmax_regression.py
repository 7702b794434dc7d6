"""The solver of the linear probe against scikit-learn, which minimizes the same objective."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from amdim_tf import softmax_regression
from amdim_tf.feature_splits import standardization
from amdim_tf.softmax_regression import SoftmaxRegression


def _problem(seed, count=300, dimension=6, classes=4):
    """Correlated features on different scales, and labels that they tell in part."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal([count, dimension]) @ rng.standard_normal([dimension, dimension])
    scores = values @ rng.standard_normal([dimension, classes]) + rng.gumbel(size=[count, classes])
    scales, shifts = 10.0 ** rng.integers(-3, 4, dimension), rng.standard_normal(dimension)
    return ((values + shifts) * scales).astype(np.float32), scores.argmax(axis=1)


def _solver(values, labels, classes=4):
    mean, std = standardization(values, labels >= 0)
    return SoftmaxRegression(values, labels, classes, mean, std), mean, std


def _objective(parameters, values, labels, regularization):
    logits = values @ parameters[:-1] + parameters[-1]
    largest = logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]
    losses = log_sums - logits[np.arange(len(labels)), labels]
    return losses.sum() + regularization / 2 * (parameters[:-1] ** 2).sum()


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(seed=st.integers(0, 10**6), exponent=st.integers(-2, 3))
def test_equals_scikit_learn(seed, exponent):
    values, labels = _problem(seed)
    hypothesis.assume(len(set(labels)) == 4)
    solver, mean, std = _solver(values, labels)
    ours = solver.solve(10.0**exponent, np.ones(len(labels), bool)).parameters
    standardized = (values.astype(float) - mean) / std
    model = LogisticRegression(C=10.0**-exponent, tol=1e-8, max_iter=10000)
    with threadpool_limits(1):  # its threads wait for each other on a busy machine
        model.fit(standardized, labels)
    theirs = np.append(model.coef_.T, model.intercept_[None], axis=0)
    values_at = [_objective(p, standardized, labels, 10.0**exponent) for p in (ours, theirs)]
    assert values_at[0] - values_at[1] < 1e-5 * len(labels)
    agreement = (standardized @ ours[:-1] + ours[-1]).argmax(axis=1) == model.predict(standardized)
    assert agreement.mean() >= 0.99


def test_every_start_leads_to_the_same_minimum():
    values, labels = _problem(1)
    solver, _, _ = _solver(values, labels)
    trained = np.ones(len(labels), bool)
    start = np.random.default_rng(0).standard_normal([7, 4])
    start -= start.mean(axis=1, keepdims=True)  # a shift of all logits changes nothing
    results = [solver.solve(1.0, trained, start).parameters for start in (None, start)]
    np.testing.assert_allclose(*results, atol=0.02)


def test_held_out_rows_are_measured_and_not_learned_from():
    values, labels = _problem(2, count=600)
    solver, mean, std = _solver(values, labels)
    trained = np.random.default_rng(0).random(600) < 0.7
    solution = solver.solve(1.0, trained)
    alone = SoftmaxRegression(values[trained], labels[trained], 4, mean, std)
    expected = alone.solve(1.0, np.ones(trained.sum(), bool)).parameters
    np.testing.assert_allclose(solution.parameters, expected, atol=0.02)
    held = (values[~trained] - mean) / std
    logits = held @ solution.parameters[:-1] + solution.parameters[-1]
    hits = logits.argmax(axis=1) == labels[~trained]
    assert solution.held_out_accuracy == pytest.approx(hits.mean())
    loss = _objective(solution.parameters, held, labels[~trained], 0) / len(held)
    assert solution.held_out_loss == pytest.approx(loss, rel=1e-4)


def test_blocks_of_any_residence_give_the_same_bits(monkeypatch):
    values, labels = _problem(3, count=9000)
    trained = np.ones(len(labels), bool)
    resident = _solver(values, labels)[0].solve(1.0, trained)
    monkeypatch.setattr(softmax_regression, "_MOST_RESIDENT_BYTES", 0)
    read = _solver(values, labels)[0].solve(1.0, trained)
    np.testing.assert_array_equal(resident.parameters, read.parameters)


def test_a_file_of_half_precision_is_read_in_place(tmp_path):
    values, labels = _problem(4, count=5000)
    values = (values / values.std(axis=0)).astype(np.float16)
    np.save(tmp_path / "features.npy", values)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    trained = np.ones(len(labels), bool)
    results = [_solver(v, labels)[0].solve(1.0, trained).parameters for v in (values, mapped)]
    np.testing.assert_array_equal(*results)


def test_unlabelled_rows_do_not_count():
    values, labels = _problem(5)
    solver, _, _ = _solver(values, labels)
    expected = solver.solve(1.0, np.ones(300, bool)).parameters
    more = np.concatenate([values, 100 * values[::-1]])
    more_labels = np.concatenate([labels, np.full(300, -1)])
    solver, _, _ = _solver(more, more_labels)
    solution = solver.solve(1.0, more_labels >= 0)
    np.testing.assert_allclose(solution.parameters, expected, atol=0.01)
    assert solution.held_out_accuracy == 0


def test_lbfgs_on_an_ill_conditioned_quadratic():
    scales = 10.0 ** np.arange(-2, 3)[:, None]
    target = np.arange(1.0, 6)[:, None]

    def objective(x):
        return 0.5 * np.sum(scales * (x - target) ** 2), scales * (x - target)

    reported = []
    x, iterations = softmax_regression.minimize(objective, np.zeros([5, 1]), reported.append)
    assert objective(x)[0] < 1e-5
    assert reported == list(range(iterations + 1))
