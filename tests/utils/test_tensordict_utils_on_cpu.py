# SPDX-License-Identifier: Apache-2.0
"""TensorDict utilities on dense, jagged, per-row and metadata columns together."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.utils import tensordict_utils as tu
from verl.utils.jagged import jagged_parts, make_jagged

LENGTHS = [2, 0, 3, 1]


def _batch() -> TensorDict:
    """Four rows; jagged x and y share their offsets, z has other lengths."""
    offsets = torch.tensor([0, 2, 2, 5, 6])
    return tu.get_tensordict(
        {
            "dense": torch.arange(8.0).reshape(4, 2),
            "x": make_jagged(torch.arange(6), offsets),
            "y": make_jagged(torch.arange(12.0).reshape(6, 2), offsets),
            "z": tu.nested_tensor_from_tensor_list([torch.full((2,), i, dtype=torch.bfloat16) for i in range(4)]),
            "row": [["a"], {"b": 1}, None, "d"],
            "same": ["s"] * 4,
            "nested": TensorDict({"inner": torch.arange(4)}, batch_size=[4]),
        },
        {"temperature": 0.7, "sizes": [1, 2]},
    )


def _expected(rows: list[int]) -> TensorDict:
    """The rows picked one by one, in plain Python: what every row operation is compared with."""
    batch = _batch()
    columns = {}
    for key in ("x", "y", "z"):
        pieces = batch[key].unbind()
        columns[key] = tu.nested_tensor_from_tensor_list([pieces[i] for i in rows])
    for key in ("row", "same"):
        columns[key] = [tu.get(batch, key)[i] for i in rows]
    columns["dense"] = torch.stack([batch["dense"][i] for i in rows])
    columns["nested"] = TensorDict({"inner": torch.tensor(rows)}, batch_size=[len(rows)])
    return tu.get_tensordict(columns, {"temperature": 0.7, "sizes": [1, 2]})


def _check(td: TensorDict, rows: list[int]) -> None:
    tu.assert_tensordict_eq(td, _expected(rows))
    # torch refuses x * y where the two do not share one offsets object
    assert td["x"].offsets() is td["y"].offsets()
    assert (td["x"] * td["x"].float()).values().tolist() == [v**2 for v in td["x"].values().tolist()]


def test_kinds_of_columns():
    td = _batch()
    assert isinstance(td.get("row"), NonTensorStack) and isinstance(td.get("same"), NonTensorStack)
    assert isinstance(td.get("sizes"), NonTensorData) and tu.get_non_tensor_data(td, "sizes", None) == [1, 2]
    assert tu.get(td, "row") == [["a"], {"b": 1}, None, "d"] and tu.get(td, "same") == ["s"] * 4
    assert tu.get(td, "dense") is td["dense"]
    assert tu.get(td, "absent", 5) == 5 and tu.get_non_tensor_data(td, "absent", 6) == 6


def test_building_rejects_uneven_columns():
    with pytest.raises(ValueError, match="'b' has 3 rows but column 'a' has 2"):
        tu.get_tensordict({"a": torch.zeros(2), "b": [1, 2, 3]})
    with pytest.raises(ValueError, match="at least one column"):
        tu.get_tensordict({}, {"t": 1})


def test_assign_non_tensor_tells_rows_from_metadata():
    td = _batch()
    tu.assign_non_tensor(td, epochs=3, fn=None, names=list("abcd"))
    assert tu.get(td, "epochs") == 3 and tu.get(td, "names") == list("abcd")
    assert isinstance(td.get("names"), NonTensorStack)
    tu.assign_non_tensor(td, epochs=4)
    assert tu.get(td, "epochs") == 4
    with pytest.raises(ValueError, match="'short' has 2 items but the batch has 4 rows"):
        tu.assign_non_tensor(td, short=[1, 2])


def test_metadata_none_and_false_are_values():
    td = tu.assign_non_tensor(_batch(), nothing=None, off=False, zero=0)
    assert tu.get(td, "nothing", "default") is None
    assert tu.get(td, "off", True) is False and tu.get(td, "zero", 1) == 0


def test_pop_and_keys():
    td = _batch()
    assert tu.pop(td, "row") == [["a"], {"b": 1}, None, "d"] and "row" not in td.keys()
    assert tu.pop(td, "row", 9) == 9
    popped = tu.pop_keys(td, ["x", "temperature"])
    assert set(popped.keys()) == {"x", "temperature"} and not {"x", "temperature"} & set(td.keys())
    assert set(tu.get_keys(td, ["y"]).keys()) == {"y"}
    for call in (lambda: tu.pop(td, "x"), lambda: tu.pop_keys(td, ["x", "y"]), lambda: tu.get_keys(td, ["x"])):
        with pytest.raises(KeyError, match="'x'"):
            call()
    assert "y" in td.keys()


@pytest.mark.parametrize("rows", [[0], [1], [3, 1, 0, 2], [1, 1, 2, 2, 2], [0, 1, 2, 3]])
def test_index_select(rows):
    _check(tu.index_select_tensor_dict(_batch(), rows), rows)
    _check(tu.index_select_tensor_dict(_batch(), torch.tensor(rows)), rows)
    _check(tu.index_select_tensor_dict(_batch(), np.array(rows) - 4), rows)


def test_index_select_by_mask_and_out_of_range():
    _check(tu.index_select_tensor_dict(_batch(), [True, False, True, False]), [0, 2])
    for bad in ([4], [-5]):
        with pytest.raises(IndexError, match="4 rows"):
            tu.index_select_tensor_dict(_batch(), bad)
    with pytest.raises(ValueError, match=r"\[4\], got \[2\]"):
        tu.index_select_tensor_dict(_batch(), [True, False])


def test_index_select_carries_gradients_through_jagged_columns():
    values = torch.arange(6.0, requires_grad=True)
    td = TensorDict({"x": make_jagged(values, torch.tensor([0, 2, 2, 5, 6]))}, batch_size=[4])
    picked = tu.index_select_tensor_dict(td, [2, 0, 2])["x"].values()
    (picked * torch.arange(1.0, 9.0)).sum().backward()
    assert values.grad.tolist() == [4.0, 5.0, 1.0 + 6.0, 2.0 + 7.0, 3.0 + 8.0, 0.0]


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (1, 2), (-1, 9)])
def test_slice(start, stop):
    _check(tu.slice_tensordict(_batch(), start, stop), list(range(4))[start:stop])


def test_chunk_concat_round_trip_and_memory():
    batch = _batch()
    parts = tu.chunk_tensordict(batch, 2)
    _check(parts[0], [0, 1])
    _check(parts[1], [2, 3])
    assert parts[1]["dense"].untyped_storage().nbytes() == parts[1]["dense"].nbytes
    assert parts[0]["x"].values().untyped_storage().nbytes() == 2 * 8
    _check(tu.concat_tensordict(parts), [0, 1, 2, 3])
    _check(tu.concat_tensordict([parts[1], parts[0], parts[1]]), [2, 3, 0, 1, 2, 3])


def test_chunk_of_unequal_size_names_the_right_sizes():
    with pytest.raises(ValueError, match="4 rows into 3 equal pieces: use 3 or 6 rows"):
        tu.chunk_tensordict(_batch(), 3)
    with pytest.raises(ValueError, match="4 rows into 5 equal pieces: use 5 rows"):
        tu.chunk_tensordict(_batch(), 5)


def test_concat_metadata_must_agree_except_metrics():
    a, b = tu.chunk_tensordict(_batch(), 2)
    tu.assign_non_tensor(a, metrics={"loss": 1.0})
    tu.assign_non_tensor(b, metrics={"loss": 2.0})
    assert tu.get(tu.concat_tensordict([a, b]), "metrics") == {"loss": 1.0}
    tu.assign_non_tensor(b, temperature=1.0)
    with pytest.raises(ValueError, match="'temperature' must be equal.*0.7.*piece 1 has 1.0"):
        tu.concat_tensordict([a, b])


def test_concat_names_the_column_that_does_not_fit():
    a, b = tu.chunk_tensordict(_batch(), 2)
    c = tu.get_keys(b, [k for k in b.keys() if k != "row"])
    with pytest.raises(ValueError, match=r"pieces 0 and 1 differ in \['row'\]"):
        tu.concat_tensordict([a, c])
    b["dense"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="'dense' has different widths"):
        tu.concat_tensordict([a, b])
    b["dense"] = tu.nested_tensor_from_tensor_list([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(ValueError, match="'dense' is of different kinds"):
        tu.concat_tensordict([a, b])
    with pytest.raises(ValueError, match="empty list"):
        tu.concat_tensordict([])


def test_union():
    td = TensorDict({"dense": torch.arange(8.0).reshape(4, 2), "new": torch.zeros(4)}, batch_size=[4])
    joined = tu.union_tensor_dict(_batch(), td)
    assert {"new", "x", "row"} <= set(joined.keys())
    nan = TensorDict({"n": torch.tensor([float("nan"), 1.0])}, batch_size=[2])
    tu.union_tensor_dict(nan, nan.clone())
    tu.union_tensor_dict(_batch(), _batch())
    for key, value in {
        "dense": torch.zeros(4, 2),
        "x": make_jagged(torch.arange(6) + 1, torch.tensor([0, 2, 2, 5, 6])),
        "z": make_jagged(_batch()["z"].values(), torch.tensor([0, 1, 4, 6, 8])),
    }.items():
        with pytest.raises(ValueError, match=f"'{key}'"):
            tu.union_tensor_dict(_batch(), TensorDict({key: value}, batch_size=[4]))
    with pytest.raises(ValueError, match="'temperature'"):
        tu.union_tensor_dict(_batch(), tu.assign_non_tensor(td.copy(), temperature=9))
    with pytest.raises(ValueError, match=r"\[4\] and \[2\]"):
        tu.union_tensor_dict(_batch(), td[:2])


def test_make_iterator():
    orders = [tu.get(p, "nested")["inner"].tolist() for p in tu.make_iterator(_batch(), 2, 1)]
    assert orders == [[0, 1], [2, 3]]
    pieces = list(tu.make_iterator(_batch(), 2, 3, seed=5, dataloader_kwargs={"shuffle": True}))
    orders = [p["nested"]["inner"].tolist() for p in pieces]
    for piece, order in zip(pieces, orders, strict=True):
        _check(piece, order)
    epochs = [orders[i] + orders[i + 1] for i in (0, 2, 4)]
    assert all(sorted(e) == [0, 1, 2, 3] for e in epochs) and len({tuple(e) for e in epochs}) > 1
    again = tu.make_iterator(_batch(), 2, 3, seed=5, dataloader_kwargs={"shuffle": True})
    assert orders == [p["nested"]["inner"].tolist() for p in again]
    with pytest.raises(ValueError, match="4 rows cannot be cut into mini-batches of 3: use a batch of 3 or 6 rows"):
        tu.make_iterator(_batch(), 3, 1)


@pytest.mark.parametrize("divisor", [1, 3, 4, 9])
def test_pad_and_unpad(divisor):
    padded, pad = tu.pad_to_divisor(_batch(), divisor)
    assert padded.batch_size[0] % divisor == 0 and pad < divisor
    _check(padded, [i % 4 for i in range(4 + pad)])
    _check(tu.unpad(padded, pad), [0, 1, 2, 3])


def test_wire_and_plain_pickle_give_the_same_batch():
    batch = tu.chunk_tensordict(_batch(), 1)[0]
    sent = pickle.loads(pickle.dumps(tu.to_wire(batch)))
    assert isinstance(sent, TensorDict)
    _check(sent, [0, 1, 2, 3])
    tu.assert_tensordict_eq(pickle.loads(pickle.dumps(batch)), _expected([0, 1, 2, 3]))
    assert tu.to_wire("other") == "other"


def test_wire_memory_is_the_receivers_own():
    """Ray hands out read-only buffers that other processes map; what is unpacked must be writable and separate."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(tu.to_wire(_batch()), protocol=5, buffer_callback=buffers.append)
    assert buffers
    frozen = [memoryview(bytes(b)) for b in buffers]
    sent = pickle.loads(stream, buffers=frozen)
    sent["dense"].add_(1)
    sent["x"].values().add_(1)
    again = pickle.loads(stream, buffers=frozen)
    _check(again, [0, 1, 2, 3])


def test_metadata_alone_travels_and_joins():
    """What an update returns: no rows, only metrics."""
    empty = tu.assign_non_tensor(TensorDict({}, batch_size=[0]), metrics={"loss": 1.0})
    sent = pickle.loads(pickle.dumps(tu.to_wire(empty)))
    joined = tu.concat_tensordict([sent, sent])
    assert joined.batch_size == (0,) and tu.get(joined, "metrics") == {"loss": 1.0}


def test_wire_drops_the_graph():
    td = TensorDict({"a": torch.ones(2, requires_grad=True) * 2}, batch_size=[2])
    assert not pickle.loads(pickle.dumps(tu.to_wire(td)))["a"].requires_grad


def test_moving_keeps_jagged_columns():
    moved = _batch().to("cpu")
    tu.assert_tensordict_eq(moved, _expected([0, 1, 2, 3]))
    assert _batch().to(torch.device("meta"))["x"].is_nested


def test_nested_tensor_from_tensor_list_is_jagged_for_equal_lengths_and_differentiable():
    leaves = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    x = tu.nested_tensor_from_tensor_list(leaves)
    assert x.layout == torch.jagged and jagged_parts(x)[1].tolist() == [0, 2, 4]
    (x.values() * torch.arange(4.0)).sum().backward()
    assert leaves[1].grad.tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="empty list"):
        tu.nested_tensor_from_tensor_list([])
    with pytest.raises(ValueError, match="scalar"):
        tu.nested_tensor_from_tensor_list([torch.tensor(1)])


def test_jagged_parts_removes_holes_and_names_wrong_input():
    holes = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 3, 6]), torch.tensor([2, 1]))
    values, offsets = jagged_parts(holes)
    assert values.tolist() == [0, 1, 3] and offsets.tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="not jagged"):
        jagged_parts(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="must be 1"):
        jagged_parts(make_jagged(torch.zeros(2, 3), torch.tensor([0, 1, 2])).transpose(1, 2))


@pytest.mark.parametrize("key", ["dense", "x", "z", "row", "same", "nested", "temperature"])
def test_assert_tensordict_eq_finds_a_difference_in_every_kind_of_column(key):
    other = _batch()
    changed = {
        "dense": lambda v: v.index_fill(0, torch.tensor([3]), -1.0),
        "x": lambda v: make_jagged(v.values(), torch.tensor([0, 1, 2, 5, 6])),
        "z": lambda v: make_jagged(v.values().float(), v.offsets()),
        "row": lambda v: tu.make_stack([["a"], {"b": 2}, None, "d"]),
        "same": lambda v: NonTensorData(data="s", batch_size=[4]),
        "nested": lambda v: TensorDict({"inner": torch.arange(4) + 1}, batch_size=[4]),
        "temperature": lambda v: NonTensorData(data=0.8, batch_size=[4]),
    }[key](other.get(key))
    other.set(key, changed)
    with pytest.raises(AssertionError, match=f"'{key}'"):
        tu.assert_tensordict_eq(_batch(), other)
    tu.assert_tensordict_eq(_batch(), _batch())
