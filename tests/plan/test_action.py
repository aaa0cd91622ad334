"""The text of an action is its name everywhere, so it must parse back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe_compile.plan import Action, ActionKind, Stream, overlap
from disagmoe_compile.plan.action import COMPUTE_KINDS

NUMBERS = st.integers(0, 300)
STREAMS = st.none() | st.sampled_from(list(Stream))
COMPUTE = st.sampled_from(sorted(COMPUTE_KINDS))
TRANSFERS = st.builds(
    "{}.{}".format, st.sampled_from(["dispatch", "combine_bwd", "residual"]), st.integers(0, 99)
)
SIMPLE = st.one_of(
    st.builds(Action, COMPUTE, NUMBERS, NUMBERS, stream=STREAMS),
    st.builds(
        Action,
        st.sampled_from([ActionKind.SEND, ActionKind.RECV, ActionKind.WAIT, ActionKind.FREE]),
        NUMBERS,
        NUMBERS,
        transfer=TRANSFERS,
        stream=STREAMS,
    ),
    st.builds(Action, st.just(ActionKind.WAIT), NUMBERS, NUMBERS, after=COMPUTE, stream=STREAMS),
    st.builds(Action, st.just(ActionKind.REDUCE_GRAD), NUMBERS, transfer=TRANSFERS, stream=STREAMS),
)
PARTS = st.lists(st.builds(Action, COMPUTE, NUMBERS, NUMBERS), min_size=1, max_size=3)


@given(SIMPLE | PARTS.map(lambda parts: overlap(*parts)))
def test_text_parses_back(action):
    assert Action.parse(str(action)) == action


@given(SIMPLE, SIMPLE)
def test_different_actions_have_different_texts(one, other):
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F1",
        "3X1",
        "3F",
        "3SEND0",
        "3SEND[dispatch.0]",
        "3F1@nowhere",
        "3REDUCE_GRAD[g]1",
        "OVERLAP()",
        "-1F0",
    ],
)
def test_malformed_text_is_an_error(text):
    with pytest.raises(ValueError):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "kind", "stream"),
    [
        ("3F1", ActionKind.FORWARD, Stream.FORWARD),
        ("2SEND[dispatch.1]0", ActionKind.SEND, Stream.COMM_SEND),
        ("2WAIT[F]0@comm_send", ActionKind.WAIT, Stream.COMM_SEND),
        ("0REDUCE_GRAD[grads.0]", ActionKind.REDUCE_GRAD, Stream.BACKWARD),
    ],
)
def test_documented_texts(text, kind, stream):
    action = Action.parse(text)
    assert (action.kind, action.stream, str(action)) == (kind, stream, text)
