import json
import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.shards.format import ShardLayout, bytes_of_empty_part, bytes_of_sample, read_header
from eagle3_pipeline.shards.listing import JOURNAL_NAME, parts_of_shard
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.shards.writer import ShardWriter
from tests.shards.build import LAYOUT, LAYOUTS, as_read, flip, invent, make_shard, place_at, same, write_shard

_STATES = ("hidden_states", "scales", "last_states", "last_scales")


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=12),
    part_bytes=st.integers(1, 12_000),
    ids=st.lists(st.text(min_size=1, max_size=20), min_size=12, max_size=12, unique=True),
    layout=st.sampled_from(LAYOUTS),
    share=st.sampled_from((0.0, 0.2, 0.8, 1.0)),
)
def test_any_samples_in_parts_of_any_size_come_back_as_their_precision_says(
    lengths: list[int], part_bytes: int, ids: list[str], layout: ShardLayout, share: float
) -> None:
    samples = {}
    for seed, (sample_id, tokens) in enumerate(zip(ids, lengths, strict=False)):
        mask = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < share
        samples[sample_id] = invent(tokens, seed) | {"loss_mask": mask}
    with tempfile.TemporaryDirectory() as temporary:
        place = place_at(Path(temporary))
        write_shard(place, samples, part_bytes, layout)
        place.verify()
        reader = ShardReader([place.folder])
        assert reader.lengths == lengths
        assert reader.sample_ids == ids[: len(lengths)]
        for index in reversed(range(len(samples))):
            sample = samples[ids[index]]
            assert same(reader[index], as_read(sample, layout))
            assert torch.equal(reader.loss_mask(index), sample["loss_mask"])
        states = 0
        for part in parts_of_shard(place.folder):
            header = read_header(part)
            assert header.layout == layout
            assert header.file_bytes <= part_bytes or len(header.sample_ids) == 1
            states += sum(end - start for name, (start, end) in header.tensors.items() if name in _STATES)
        trained = sum(int(sample["loss_mask"].sum()) for sample in samples.values())
        assert states == layout.state_bytes(sum(lengths), trained)


def test_several_shards_read_as_one_list_at_random_and_from_another_process(tmp_path: Path) -> None:
    first, second = ([invent(tokens, 10 * tokens) for tokens in lengths] for lengths in ([3, 5, 2], [7, 1]))
    folders = [
        make_shard(tmp_path, first, 1, "p4-s000")[0],
        make_shard(tmp_path, second, 1 << 20, "p4-s001")[0],
    ]
    reader = pickle.loads(pickle.dumps(ShardReader(folders)))
    assert len(reader) == 5
    assert reader.lengths == [3, 5, 2, 7, 1]
    assert reader.sample_ids == ["p4-s000-0", "p4-s000-1", "p4-s000-2", "p4-s001-0", "p4-s001-1"]
    assert reader.layout == LAYOUT
    for index in (4, 0, 2, -2, 1):
        assert same(reader[index], [*first, *second][index])
    with pytest.raises(IndexError):
        reader[5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_fetched_ahead_are_the_states_of_these_samples_alone(
    layout: ShardLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [invent(tokens, tokens, layout) for tokens in (3, 5, 2)]
    folder, _ = make_shard(tmp_path, samples, 1 << 20, "p4-s000", layout)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, start, length, advice: asked.append((start, length))
    )
    reader = ShardReader([folder])
    reader.prefetch([1])
    part = next(folder.glob("part-*")).read_bytes()
    with safe_open(next(folder.glob("part-*")), framework="pt") as file:
        wanted = [file.get_tensor("hidden_states")[3:8]]
        if layout.kept == "trained":
            wanted.append(file.get_tensor("last_states")[2:5])
    found = [part[start : start + length] for start, length in asked]
    assert found == [bytes(one.contiguous().view(torch.uint8).flatten().tolist()) for one in wanted]


def test_a_part_is_an_ordinary_safetensors_file_whose_header_says_what_it_is(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0), invent(4, 1)])
    with safe_open(folder / "part-00000.safetensors", framework="pt") as file:
        said = file.metadata()
        assert said["format_version"] == "2"
        assert (said["layer_ids"], said["layer_convention"]) == ("[2, 5, 8]", "input-of-layer")
        assert (said["pre_norm_last"], said["dtype"]) == ("true", "bfloat16")
        assert json.loads(said["sample_ids"]) == ["p4-s000-0", "p4-s000-1"]
        assert said["model_fingerprint"] == "m" * 64
        assert file.get_tensor("offsets").tolist() == [0, 3, 7]
        assert file.get_slice("hidden_states").get_shape() == [7, 3, 4]


def test_states_in_8_bits_and_a_last_layer_on_completions_are_read_with_plain_safetensors(
    tmp_path: Path,
) -> None:
    layout = LAYOUTS[-1]
    sample = invent(5, 0)
    folder, _ = make_shard(tmp_path, [invent(4, 1), sample], layout=layout)
    with safe_open(folder / "part-00000.safetensors", framework="pt") as file:
        said = file.metadata()
        assert (said["dtype"], said["kept"]) == ("float8_e4m3fn", "trained")
        start, end = file.get_tensor("offsets").tolist()[1:]
        states = (
            file.get_slice("hidden_states")[start:end].float() * file.get_tensor("scales")[start:end, :, None]
        )
        first, stop = file.get_tensor("last_offsets").tolist()[1:]
        last = (
            file.get_slice("last_states")[first:stop].float()
            * file.get_tensor("last_scales")[first:stop, None]
        )
    expected = as_read(sample, layout)["hidden_states"].float()
    assert torch.equal(states, expected[:, :-1])
    assert torch.equal(last, expected[sample["loss_mask"], -1])


def test_a_shard_that_is_read_and_written_again_holds_the_same(tmp_path: Path) -> None:
    for number, layout in enumerate(LAYOUTS):
        reader = ShardReader([make_shard(tmp_path / f"{number}", [invent(9, 0)], layout=layout)[0]])
        again = ShardReader([make_shard(tmp_path / f"{number}-again", [reader[0]], layout=layout)[0]])
        assert same(again[0], reader[0])


def test_a_mask_that_does_not_fit_the_rows_of_the_last_layer_is_damage(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(5, 0), invent(6, 1)], layout=LAYOUTS[1])
    flip(folder / "part-00000.safetensors", -1)
    reader = ShardReader([folder])
    assert len(reader[0]["token_ids"]) == 5
    with pytest.raises(DamagedFile, match="rows of the last layer"):
        reader[1]


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_part_that_is_cut_or_grown_is_damaged_whether_the_manifest_is_asked_or_not(
    tmp_path: Path, cut: int
) -> None:
    folder, _ = make_shard(tmp_path, [invent(600, 0)])
    part = folder / "part-00000.safetensors"
    data = part.read_bytes()
    for broken in (data[:-cut], data[: cut - 1], data + b"x"):
        part.write_bytes(broken)
        with pytest.raises(DamagedFile, match=r"part-00000.safetensors has \d+ bytes, expected \d+"):
            ShardReader([folder])
        with pytest.raises(DamagedFile, match="part-00000"):
            read_header(part)
    part.unlink()
    with pytest.raises(DamagedFile, match="missing"):
        ShardReader([folder])


def test_a_header_of_another_format_version_or_convention_is_refused(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(6, 0)])
    part = folder / "part-00000.safetensors"
    data = part.read_bytes()
    for found, other in (
        (b'"format_version":"2"', b'"format_version":"9"'),
        (b"input-of-layer", b"outputoflayers"),
    ):
        part.write_bytes(data.replace(found, other))
        with pytest.raises(DamagedFile, match="expected"):
            ShardReader([folder])


@pytest.mark.parametrize(
    "other", [ShardLayout(LAYOUT.layer_ids, 4, "o" * 64), ShardLayout((1, 5, 8), 4, "m" * 64), *LAYOUTS[1:]]
)
def test_shards_of_different_models_layers_or_precisions_are_not_read_together(
    tmp_path: Path, other: ShardLayout
) -> None:
    folders = [
        make_shard(tmp_path, [invent(3, 0)])[0],
        make_shard(tmp_path, [invent(3, 0)], shard="p4-s001", layout=other)[0],
    ]
    with pytest.raises(DamagedFile, match="one target and the same layers"):
        ShardReader(folders)


def test_a_shard_without_a_manifest_is_not_there(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    (folder / "manifest.json").unlink()
    with pytest.raises(MissingInput, match="not complete"):
        ShardReader([folder])


def test_the_journal_goes_when_the_manifest_stands(tmp_path: Path) -> None:
    folder, manifest = make_shard(tmp_path, [invent(3, 0)])
    assert not (folder / JOURNAL_NAME).exists()
    assert [entry.path for entry in manifest.files] == ["part-00000.safetensors"]


def test_samples_that_do_not_fit_the_layout_are_a_bug_of_the_caller(tmp_path: Path) -> None:
    good = invent(3, 0)
    with ShardWriter(tmp_path, LAYOUT, 1 << 20, "f" * 64) as writer:
        for changes in (
            {"hidden_states": good["hidden_states"][:2]},
            {"hidden_states": good["hidden_states"].float()},
            {"loss_mask": torch.ones(2)},
            {name: tensor[:0] for name, tensor in good.items()},
        ):
            with pytest.raises(ValueError, match="x: "):
                writer.add("x", **(good | changes))
        assert writer.complete() == {}


@pytest.mark.parametrize("kept", LAYOUTS)
def test_the_bounds_of_an_empty_part_and_of_a_sample_cover_what_is_written(
    tmp_path: Path, kept: ShardLayout
) -> None:
    layout = replace(kept, layer_ids=tuple(range(1, 200)), hidden_size=2)
    sample = invent(1, 0, layout)
    with ShardWriter(tmp_path, layout, 1, "f" * 64) as writer:
        writer.add("a", **sample)
        (part,) = writer.complete()
    assert part.stat().st_size < bytes_of_empty_part(layout) + bytes_of_sample("a", 1, 1, layout)
    assert bytes_of_sample("a", 1, 1, layout) < layout.bytes_per_token + 32
