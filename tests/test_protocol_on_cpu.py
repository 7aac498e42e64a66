# SPDX-License-Identifier: Apache-2.0
"""DataProto: building, columns, rows, joining, and the way through a pickle."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl.protocol import (
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    chunk_data,
    concat_data,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from verl.utils import tensordict_utils as tu


def _proto(rows: int = 4, **meta) -> DataProto:
    return DataProto.from_dict(
        {"a": torch.arange(rows), "b": torch.arange(rows * 3.0).reshape(rows, 3)},
        {"uid": [f"u{i}" for i in range(rows)], "chat": [[{"i": i}] for i in range(rows)]},
        meta,
    )


def _rows(data: DataProto) -> list[int]:
    """The row numbers, after a check that all columns moved together."""
    rows = data.batch["a"].tolist()
    assert data.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in rows]
    assert data.non_tensor_batch["chat"].tolist() == [[{"i": i}] for i in rows]
    assert torch.equal(data.batch["b"], torch.arange(3.0) + 3 * data.batch["a"][:, None])
    return rows


def test_building_keeps_lists_as_objects_and_rejects_uneven_columns():
    data = DataProto.from_single_dict({"a": torch.zeros(2, 1), "pair": [[1, 2], [3, 4]]}, {"t": 1.0})
    assert len(data) == 2 and data.non_tensor_batch["pair"].shape == (2,) and data.non_tensor_batch["pair"][1] == [3, 4]
    with pytest.raises(ValueError, match="'b' has 3 rows.*'a' has 2"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="'uid' has 3 rows, the batch has 2"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"uid": ["x"] * 3})
    with pytest.raises(ValueError, match="'c' must be a tensor, an array or a list, got str"):
        DataProto.from_single_dict({"a": torch.zeros(2), "c": "no"})


def test_a_batch_without_tensors_has_a_length_and_rows():
    data = DataProto.from_dict(non_tensors={"uid": ["x", "y", "z"]})
    assert len(data) == 3 and data[1:].non_tensor_batch["uid"].tolist() == ["y", "z"]
    assert len(DataProto()) == 0


def test_tensordict_there_and_back_is_the_identity():
    data = _proto(temperature=0.7)
    td = data.to_tensordict()
    assert tu.get(td, "uid") == ["u0", "u1", "u2", "u3"] and tu.get(td, "temperature") == 0.7
    back = DataProto.from_tensordict(td, {"more": 1})
    assert _rows(back) == [0, 1, 2, 3] and back.meta_info == {"temperature": 0.7, "more": 1}
    with pytest.raises(ValueError, match="'a' stands for two"):
        _proto(a=1).to_tensordict()


def test_equal_objects_in_every_row_stay_a_column():
    data = DataProto.from_dict({"a": torch.arange(2)}, {"source": ["s", "s"]})
    back = DataProto.from_tensordict(data.to_tensordict())
    assert back.non_tensor_batch["source"].tolist() == ["s", "s"] and back.meta_info == {}


def test_select_pop_and_rename():
    data = _proto(t=1, u=2)
    part = data.select(["a"], ["uid"], ["t"])
    assert set(part.batch.keys()) == {"a"} and set(part.non_tensor_batch) == {"uid"} and part.meta_info == {"t": 1}
    assert data.select([]).batch is None and len(data.select([])) == 4
    data.select().batch["new"] = torch.zeros(4)
    assert "new" not in data.batch.keys()
    deep = data.select(deepcopy=True)
    deep.batch["a"].add_(1)
    assert _rows(data) == [0, 1, 2, 3]
    popped = data.pop(["b"], ["chat"], ["u"])
    assert set(data.batch.keys()) == {"a"} and set(data.non_tensor_batch) == {"uid"} and data.meta_info == {"t": 1}
    assert set(popped.batch.keys()) == {"b"} and popped.meta_info == {"u": 2}
    data.rename("a", "z")
    assert data.batch["z"].tolist() == [0, 1, 2, 3] and "a" not in data.batch.keys()
    with pytest.raises(KeyError, match="nope"):
        data.select(["nope"])
    with pytest.raises(KeyError, match="nope"):
        data.pop(non_tensor_batch_keys=["nope"])
    with pytest.raises(ValueError, match="as many new names"):
        data.rename(["z"], ["x", "y"])


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (DataProto.from_dict({"a": torch.arange(4) + 1}), "'a'"),
        (DataProto.from_dict({"c": torch.arange(4)}, {"uid": ["v"] * 4}), "'uid'"),
        (DataProto.from_dict({"c": torch.arange(4)}, meta_info={"t": 2}), "'t'"),
        (DataProto.from_dict({"c": torch.arange(3)}), "4 rows with one of 3"),
    ],
)
def test_union_names_the_conflict_and_changes_nothing(other, key):
    data = _proto(t=1)
    with pytest.raises(ValueError, match=key):
        data.union(other)
    assert set(data.batch.keys()) == {"a", "b"} and data.meta_info == {"t": 1} and _rows(data) == [0, 1, 2, 3]


def test_union_accepts_equal_values_also_nan():
    data, nan = _proto(), torch.tensor([1.0, float("nan"), 2.0, 3.0])
    data.union(DataProto.from_dict({"n": nan}, {"score": [1.0, float("nan"), 2.0, 3.0]}))
    data.union(DataProto.from_dict({"n": nan.clone()}, {"score": [1.0, float("nan"), 2.0, 3.0]}, {"x": 1}))
    assert set(data.batch.keys()) == {"a", "b", "n"} and data.meta_info == {"x": 1}


def test_rows_by_every_kind_of_index():
    data = _proto()
    assert _rows(data[1:3]) == [1, 2] and _rows(data[::-2]) == [3, 1] and _rows(data[-2:]) == [2, 3]
    assert _rows(data[[2, 0]]) == [2, 0] and _rows(data[np.array([-1])]) == [3]
    assert _rows(data[torch.tensor([True, False, False, True])]) == [0, 3]
    assert len(data[4:]) == 0
    item = data[-1]
    assert isinstance(item, DataProtoItem) and item.batch["a"] == 3 and item.non_tensor_batch["uid"] == "u3"
    with pytest.raises(IndexError, match="4 rows"):
        data[4]
    with pytest.raises(IndexError, match="4 rows"):
        data[[0, 9]]


def test_repeat_reorder_split():
    data = _proto(2)
    assert _rows(data.repeat(2)) == [0, 0, 1, 1] and _rows(data.repeat(2, interleave=False)) == [0, 1, 0, 1]
    data = _proto(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert _rows(data) == [2, 0, 1]
    assert [_rows(p) for p in data.split(2)] == [[2, 0], [1]]


def test_chunk_of_unequal_size_names_the_right_sizes():
    assert [_rows(p) for p in _proto(4).chunk(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="5 rows into 4 equal pieces: use 4 or 8 rows"):
        _proto(5).chunk(4)
    with pytest.raises(ValueError, match="2 rows into 4 equal pieces: use 4 rows"):
        _proto(2).chunk(4)


def test_auto_padding_chunks_unevenly_and_concat_undoes_it():
    data = DataProto.from_dict({"a": torch.arange(5)}, auto_padding=True)
    parts = data.chunk(3)
    assert [p.batch["a"].tolist() for p in parts] == [[0, 1], [2, 3], [4]]
    assert DataProto.concat(parts).batch["a"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="5 rows into 6"):
        data.chunk(6)


def test_concat_merges_metrics_and_timing_and_refuses_other_meta():
    a, b = _proto(2, metrics={"x": 1}, timing={"gen": 1.0}, t=1), _proto(2, metrics={"x": 2}, timing={"gen": 3.0}, t=1)
    joined = DataProto.concat([a, b])
    assert joined.batch["a"].tolist() == [0, 1, 0, 1] and joined.non_tensor_batch["uid"].tolist() == ["u0", "u1"] * 2
    assert joined.meta_info == {"metrics": [{"x": 1}, {"x": 2}], "timing": {"gen": 3.0}, "t": 1}
    with pytest.raises(ValueError, match="'t' must be equal.*1 and 2"):
        DataProto.concat([_proto(t=1), _proto(t=2)])
    with pytest.raises(ValueError, match=r"\['chat', 'uid'\]"):
        DataProto.concat([_proto(), DataProto(_proto().batch)])
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])


def test_pieces_do_not_share_memory_with_the_batch():
    data = _proto()
    parts = data.chunk(2)
    parts[0].batch["a"].add_(10)
    assert _rows(data) == [0, 1, 2, 3]
    assert parts[1].batch["b"].untyped_storage().nbytes() == parts[1].batch["b"].nbytes


def test_make_iterator_covers_each_epoch_once_and_repeats_with_the_seed():
    data = _proto(6, t=1)
    epochs = [_rows(p) for p in data.make_iterator(3, 2, seed=1, dataloader_kwargs={"shuffle": True})]
    assert [len(p) for p in epochs] == [3] * 4
    assert sorted(epochs[0] + epochs[1]) == sorted(epochs[2] + epochs[3]) == list(range(6))
    assert epochs[0] + epochs[1] != epochs[2] + epochs[3]
    assert epochs == [_rows(p) for p in data.make_iterator(3, 2, seed=1, dataloader_kwargs={"shuffle": True})]
    assert [_rows(p) for p in data.make_iterator(2, 1)] == [[0, 1], [2, 3], [4, 5]]
    assert next(data.make_iterator(2, 1)).meta_info == {"t": 1}
    with pytest.raises(ValueError, match="6 rows cannot be cut into mini-batches of 4: use a batch of 4 or 8"):
        data.make_iterator(4, 1)
    with pytest.raises(ValueError, match="num_workers"):
        data.make_iterator(2, 1, dataloader_kwargs={"num_workers": 3})


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 11])
def test_padding_to_a_divisor_and_back(divisor):
    data = _proto(4)
    padded, pad = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and len(padded) - pad == 4 and pad < divisor
    assert _rows(padded) == [i % 4 for i in range(4 + pad)]
    assert _rows(unpad_dataproto(padded, pad)) == [0, 1, 2, 3]


def test_disk_and_pickle_keep_dtypes_jagged_columns_and_objects(tmp_path):
    data = _proto(3, t={"x": [1]})
    data.batch["half"] = torch.randn(3, 2, dtype=torch.bfloat16)
    data.batch["j"] = tu.nested_tensor_from_tensor_list([torch.arange(2), torch.arange(0), torch.arange(3)])
    data.save_to_disk(str(tmp_path / "batch.pkl"))
    for back in (DataProto.load_from_disk(str(tmp_path / "batch.pkl")), pickle.loads(pickle.dumps(data))):
        assert _rows(back) == [0, 1, 2] and back.meta_info == {"t": {"x": [1]}}
        tu.assert_tensordict_eq(back.batch, data.batch)
        back.batch["a"].add_(1)
    assert _rows(data) == [0, 1, 2]


def test_print_size(capsys):
    _proto(4).print_size("step")
    # 4 int64, 12 float32, 2 x 4 pointers: 144 bytes
    assert capsys.readouterr().out == "step: DataProto of 4 rows, 0.000 MB\n" and _proto(4).nbytes() == 144


def test_type_dispatch_for_the_controller():
    td = TensorDict({"a": torch.arange(4)}, batch_size=[4])
    assert [p["a"].tolist() for p in chunk_data(td, 2)] == [[0, 1], [2, 3]]
    assert [_rows(p) for p in chunk_data(_proto(), 2)] == [[0, 1], [2, 3]]
    assert concat_data(chunk_data(td, 2))["a"].tolist() == [0, 1, 2, 3]
    assert _rows(concat_data(chunk_data(_proto(), 4))) == [0, 1, 2, 3]
    assert concat_data([None, None]) is None
    with pytest.raises(TypeError, match="list"):
        chunk_data([1, 2], 2)
    with pytest.raises(TypeError, match="NoneType"):
        concat_data([td, None])


def test_future_waits_joins_and_chunks(monkeypatch):
    import ray

    results = {"r0": _proto(2), "r1": _proto(2)}
    monkeypatch.setattr(ray, "get", lambda refs: [results[ref] for ref in refs])
    future = DataProtoFuture(concat_data, ["r0", "r1"])
    assert future.get().batch["a"].tolist() == [0, 1, 0, 1]
    assert [len(piece.get()) for piece in chunk_data(future, 4)] == [1] * 4
    assert chunk_data(future, 4)[1].get().batch["a"].tolist() == [1]
    assert len(DataProtoFuture.concat(["r0", "r1"]).get()) == 4
