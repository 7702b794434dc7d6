"""The training step as XLA sees it: the nearest thing to a TPU here."""

import re

import pytest
import tensorflow as tf
from test_model import make_batch, make_config

from amdim_tf import distribution, training_loop


def _hlo(function, *arguments):
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*arguments)(stage="hlo")


def _assert_static_and_on_the_device(hlo):
    assert "ENTRY" in hlo
    assert not re.search(r"\[[^\]]*<=", hlo), "a dynamic dimension"
    for callback in ("custom-call", "infeed", "outfeed", "send(", "recv("):
        assert callback not in hlo, callback


def _step(**settings):
    """A step in the form that accelerators run: both views as one batch."""
    config = make_config(xla="on", **settings)
    return training_loop.compiled_model(config, 3, 10, distribution.resolve(config)).training_step


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_step_lowers_to_xla(size):
    step, batch = _step(image_size=size, n_depth=1, use_bn=True), make_batch(size)
    drawn = step.draw(8)
    _assert_static_and_on_the_device(_hlo(step, batch, drawn))
    passes = {**batch, "noise": drawn["noise"]}
    labelled = tf.constant(12.0)
    _assert_static_and_on_the_device(_hlo(step.forward, passes, labelled))
    embedded = step.forward(passes, labelled).embedded
    # What lies between the communications of a replica that is the second of two.
    nce = step.replica_nce
    antecedents = nce.antecedents(*embedded, drawn["locations"])
    everyone = tf.nest.map_structure(lambda part: tf.concat([part, part], axis=0), antecedents)
    consequents = nce.consequents(embedded.views)
    sums = everyone, consequents, tf.constant(8)
    _assert_static_and_on_the_device(_hlo(_gradient_of(nce.sums), *sums))
    log_sums, squares = nce.sums(*sums)
    losses = antecedents, consequents, log_sums[8:], squares
    _assert_static_and_on_the_device(_hlo(_gradient_of(nce.losses), *losses))


def _gradient_of(function):
    """The gradient of all that it returns, for its first two arguments."""

    def gradient(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(tf.nest.flatten(arguments[:2]))
            found = tf.nest.flatten(function(*arguments))
        return tape.gradient(found, arguments[:2], unconnected_gradients="zero")

    return gradient


@pytest.mark.slow
def test_microbatches_and_blocks_lower_to_xla():
    step = _step(n_depth=1, microbatch=4, nce_block="3")
    _assert_static_and_on_the_device(_hlo(step, make_batch(), step.draw(8)))
