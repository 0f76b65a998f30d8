import errno
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_pipeline.errors import MissingInput, NotEnoughRoom, QualityError, RecipeError, ServerDied
from eagle3_pipeline.extraction import plan
from eagle3_pipeline.extraction import run as run_module
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.extraction.plan import PlannedSample, ShardPlan
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.samples import Sample
from eagle3_pipeline.shards import part as part_module
from eagle3_pipeline.shards.reader import ShardReader
from tests.extraction.build import (
    HIDDEN,
    IN_FLIGHT,
    LAYERS,
    PER_SHARD,
    PROOF,
    StandIn,
    audit,
    invent,
    make_lineage,
)
from tests.extraction.target import TARGET
from tests.fakes.faults import Faults
from tests.fakes.states import expected_states, write_states

S0, S1 = "p10-s000", "p10-s001"


@pytest.fixture
def server() -> StandIn:
    return StandIn()


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    return audit(make_lineage(tmp_path))


def _extract(server: StandIn, lineage: Lineage, *shards: str) -> list[tuple[str, Manifest]]:
    told: list[tuple[str, Manifest]] = []
    opener = server.open(lineage.staging)
    made = extract_shards(lineage, shards or (S0, S1), opener, lambda shard, made: told.append((shard, made)))
    assert made == [dict(told)[shard] for shard in shards or (S0, S1)]
    return told


def _holds_the_states_of(lineage: Lineage, shard: str, samples: list[Sample], longest: int = 63) -> None:
    reader = ShardReader([lineage.hidden_state_shards(shard).folder])
    assert sorted(reader.sample_ids) == sorted(sample.sample_id for sample in samples)
    by_id = {sample.sample_id: sample for sample in samples}
    for index, sample_id in enumerate(reader.sample_ids):
        wanted, found = by_id[sample_id], reader[index]
        ids = wanted.token_ids[:longest]
        assert found["token_ids"].tolist() == ids
        assert found["loss_mask"].int().tolist() == wanted.loss_mask[:longest]
        expected = expected_states(ids, LAYERS, HIDDEN, TARGET)
        assert torch.equal(found["hidden_states"].float(), torch.tensor(expected))


def _all(shard: int) -> list[Sample]:
    return [invent(shard, index) for index in range(PER_SHARD)]


def test_all_missing_shards_are_made_through_one_server_in_order(server: StandIn, lineage: Lineage) -> None:
    told = _extract(server, lineage)
    assert [shard for shard, _ in told] == [S0, S1]
    assert server.opened == 1
    for number, (shard, manifest) in enumerate(told):
        samples = _all(number)
        _holds_the_states_of(lineage, shard, samples)
        tokens = sum(len(sample.token_ids) for sample in samples)
        facts = manifest.facts
        assert (facts["samples"], facts["tokens"]) == (PER_SHARD, tokens)
        assert (facts["precision"], facts["layers"]) == ("bf16", list(LAYERS))
        assert facts["meaning"]["sampled"]["agreed_share"] == 1.0
        assert facts["parts"] == len(manifest.files) > 1
        assert (facts["quarantined"], facts["skipped"]) == ({}, {})
        assert lineage.hidden_state_shards(shard).verify() == manifest
    assert not list(server.staging.glob("*safetensors*"))


def test_made_shards_are_told_again_without_any_server(server: StandIn, lineage: Lineage) -> None:
    first = _extract(server, lineage)
    assert _extract(server, lineage) == first
    assert server.opened == 1


def test_a_journal_that_a_kill_left_beside_a_manifest_is_removed(server: StandIn, lineage: Lineage) -> None:
    _extract(server, lineage, S0)
    journal = lineage.hidden_state_shards(S0).folder / "parts.journal"
    journal.touch()
    _extract(server, lineage, S0)
    assert not journal.exists()


def test_only_missing_shards_are_asked_for(server: StandIn, lineage: Lineage) -> None:
    _extract(server, lineage, S1)
    assert [shard for shard, _ in _extract(server, lineage)] == [S1, S0]
    assert {ids[1] for ids in server.requests} == set(range(PER_SHARD))


def test_requests_run_over_the_border_of_shards(server: StandIn, lineage: Lineage) -> None:
    first_is_held, next_shard_is_reached = threading.Event(), threading.Event()

    def hold_the_last_of_the_first_shard(number: int, ids: list[int]) -> None:
        if number < PROOF:
            return
        if ids[1] == PER_SHARD - 1:
            first_is_held.set()
            assert next_shard_is_reached.wait(10), "the next shard waits for the end of this one"
        if ids[1] >= 100:
            assert first_is_held.wait(10)
            next_shard_is_reached.set()

    server.on_request = hold_the_last_of_the_first_shard
    _extract(server, lineage)
    assert server.most_in_flight <= IN_FLIGHT


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_more_is_on_its_way_than_the_bytes_of_the_staging(
    server: StandIn, tmp_path: Path, precision: str
) -> None:
    """Files are captured as bf16, whatever the shard keeps of them."""
    sizes = [len(sample.token_ids) * (len(LAYERS) * HIDDEN * 2 + 9) for sample in _all(0)]
    # A quarter is for samples that were captured alone and wait to be compared.
    staging_gib = (sum(sizes[:5]) - 10) / 0.75 / 2**30
    lineage = audit(make_lineage(tmp_path, staging_gib=staging_gib, precision=precision))
    made: list[int] = []

    def hold_the_first(number: int, ids: list[int]) -> None:
        if number >= PROOF and ids[1] == 0:
            time.sleep(0.3)  # all that may be asked for meanwhile is asked for
            made.append(len(server.requests) - PROOF)

    server.on_request = hold_the_first
    _extract(server, lineage)
    assert made == [4]


def test_samples_that_do_not_train_are_skipped_and_counted(server: StandIn, tmp_path: Path) -> None:
    verdicts = ["good", "truncated", "empty", "degenerate", "refused", "degenerate"]
    samples = [invent(0, index, verdict=verdict) for index, verdict in enumerate(verdicts)]
    samples.append(invent(0, 6, prompt_token_ids=[1, *range(63)]))  # 64 tokens: no room for the completion
    samples.append(invent(0, 7, completion_token_ids=list(range(200, 300))))  # is cut to 63 tokens
    lineage = audit(make_lineage(tmp_path, [samples]))
    ((_, manifest),) = _extract(server, lineage, S0)
    assert manifest.facts["skipped"] == {"empty": 1, "degenerate": 2, "refused": 1, "completion_cut_off": 1}
    _holds_the_states_of(lineage, S0, [samples[0], samples[1], samples[7]])
    assert max(len(ids) for ids in server.requests) == 63  # the server's 64, less the one token it generates


def test_a_server_is_proven_once_after_its_start(server: StandIn, lineage: Lineage) -> None:
    server.starts = 1
    _extract(server, lineage, S0)
    assert len(server.requests) >= PROOF + PER_SHARD
    _extract(server, lineage, S1)
    assert {ids[1] for ids in server.requests} == {100 + index for index in range(PER_SHARD)}
    assert len(server.requests) < PROOF
    server.starts = 2
    lineage.hidden_state_shards(S0).folder.joinpath("manifest.json").unlink()
    _extract(server, lineage, S0)
    assert len(server.requests) >= PROOF + PER_SHARD


def test_a_shard_with_nothing_to_train_on_is_made_and_empty(server: StandIn, tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [[invent(0, index, verdict="empty") for index in range(2)]])
    ((_, manifest),) = _extract(server, audit(lineage), S0)
    assert manifest.files == ()
    assert len(ShardReader([lineage.hidden_state_shards(S0).folder])) == 0


def test_after_a_dead_server_only_missing_samples_are_asked_for(server: StandIn, lineage: Lineage) -> None:
    def die_late(number: int, ids: list[int]) -> None:
        if number >= PROOF and ids[1] == 7:
            time.sleep(0.2)  # the samples before this one reach their parts
            server.dead = True

    server.on_request = die_late
    with pytest.raises(ServerDied):
        _extract(server, lineage)
    assert lineage.hidden_state_shards(S0).manifest() is None
    server.on_request, server.dead = (lambda number, ids: None), False
    _extract(server, lineage)
    again = {ids[1] for ids in server.requests[PROOF:] if ids[1] < 100}
    assert 7 in again
    assert len(again) < PER_SHARD
    _holds_the_states_of(lineage, S0, _all(0))
    _holds_the_states_of(lineage, S1, _all(1))


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(nan_share=1.0), "not_finite"),
        (Faults(short_share=1.0), "rows_differ"),
        (Faults(wrong_ids_share=1.0), "token_ids_differ"),
    ],
)
def test_more_than_one_in_a_hundred_unusable_states_fail_the_step(
    server: StandIn, lineage: Lineage, faults: Faults, reason: str
) -> None:
    server.on_request = lambda number, ids: faults if number >= PROOF else None
    with pytest.raises(QualityError, match=f"2 of 10 samples.*{reason}"):
        _extract(server, lineage)
    server.on_request = lambda number, ids: None
    _extract(server, lineage)
    _holds_the_states_of(lineage, S0, _all(0))


def test_one_unusable_sample_is_left_out_and_counted(
    server: StandIn, lineage: Lineage, caplog: pytest.LogCaptureFixture
) -> None:
    server.on_request = lambda number, ids: 400 if ids[1] == 3 else None
    (_, manifest), _ = _extract(server, lineage)
    assert manifest.facts["quarantined"] == {"refused_by_server": 1}
    _holds_the_states_of(lineage, S0, [sample for sample in _all(0) if sample.sample_id != "3-t0"])
    assert "3-t0 is quarantined: refused_by_server" in caplog.text
    assert sum(ids[1] == 3 for ids in server.requests[PROOF:]) == 1


def test_a_full_disk_stops_cleanly_and_finished_shards_stand(
    server: StandIn, lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = part_module.encode_header

    def full(layout: Any, sample_ids: tuple[str, ...], tokens: int, trained: int) -> bytes:
        if "103-t0" in sample_ids:
            raise OSError(errno.ENOSPC, "No space left on device")
        return encode(layout, sample_ids, tokens, trained)

    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(part_module, "encode_header", full)
        with pytest.raises(NotEnoughRoom, match="Finished shards and parts stand"):
            extract_shards(
                lineage, (S0, S1), server.open(lineage.staging), lambda shard, manifest: told.append(shard)
            )
    assert told == [S0]
    assert lineage.hidden_state_shards(S1).manifest() is None
    assert not list(server.staging.glob("*safetensors*"))
    _extract(server, lineage)
    assert not {100, 101, 102} & {ids[1] for ids in server.requests[PROOF:]}
    _holds_the_states_of(lineage, S1, _all(1))


def test_too_little_room_is_said_before_the_server_is_opened(server: StandIn, tmp_path: Path) -> None:
    lineage = audit(make_lineage(tmp_path, storage={"keep_free_gib": 1e9}))
    with pytest.raises(NotEnoughRoom, match=r"still take .*storage\.keep_free_gib keeps"):
        _extract(server, lineage, S0)
    assert server.opened == 0


def test_a_sample_that_fails_once_is_captured_again_and_counted(server: StandIn, lineage: Lineage) -> None:
    struck: list[int] = []

    def break_the_first_time(number: int, ids: list[int]) -> Faults | None:
        if number < PROOF or ids[1] not in (4, 6) or ids[1] in struck:
            return None
        struck.append(ids[1])
        return Faults(nan_share=1.0)

    server.on_request = break_the_first_time
    (_, manifest), _ = _extract(server, lineage)
    assert (manifest.facts["retried"], manifest.facts["quarantined"]) == (2, {})
    _holds_the_states_of(lineage, S0, _all(0))


def test_states_of_other_samples_fail_the_shard_and_are_not_kept(server: StandIn, lineage: Lineage) -> None:
    server.on_request = lambda number, ids: Faults(shifted_share=1.0) if number >= PROOF else None
    with pytest.raises(QualityError, match="hidden states of p10-s000 are wrong: after"):
        _extract(server, lineage)
    assert not list(lineage.hidden_state_shards(S0).folder.glob("part-*"))
    server.on_request = lambda number, ids: None
    _extract(server, lineage)
    assert len({tuple(ids) for ids in server.requests[PROOF:]}) == 2 * PER_SHARD
    _holds_the_states_of(lineage, S0, _all(0))


def test_what_a_killed_run_found_in_its_parts_counts_in_the_verdict(
    server: StandIn, lineage: Lineage
) -> None:
    def mix_up_and_die(number: int, ids: list[int]) -> Faults | None:
        if number < PROOF:
            return None
        if ids[1] == 8:
            time.sleep(0.2)  # the samples before this one reach their parts
            server.dead = True
        return Faults(shifted_share=1.0)

    server.on_request = mix_up_and_die
    with pytest.raises(ServerDied):
        _extract(server, lineage)
    assert list(lineage.hidden_state_shards(S0).folder.glob("part-*"))
    server.on_request, server.dead = (lambda number, ids: None), False
    with pytest.raises(QualityError, match="hidden states of p10-s000 are wrong: after"):
        _extract(server, lineage)


def test_where_states_depend_on_company_no_part_of_the_shard_is_taken_by_the_next_run(
    server: StandIn, lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "is_compared", lambda first, position: position == 8)

    def differ_alone(number: int, ids: list[int]) -> Faults | None:
        of_this = [one for one in server.requests[PROOF:] if one[1] == 8]
        return Faults(shifted_share=1.0) if number >= PROOF and ids[1] == 8 and len(of_this) == 2 else None

    server.on_request = differ_alone
    with pytest.raises(QualityError, match="8-t0, captured alone, differ"):
        _extract(server, lineage)
    assert not list(lineage.hidden_state_shards(S0).folder.glob("part-*"))
    server.on_request = lambda number, ids: None
    (_, manifest), _ = _extract(server, lineage)
    assert {ids[1] for ids in server.requests[PROOF:]} >= set(range(PER_SHARD))
    assert manifest.facts["compared_alone"] == 1
    _holds_the_states_of(lineage, S0, _all(0))


def test_a_sample_whose_comparison_did_not_end_is_compared_by_the_next_run(
    server: StandIn, lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "is_compared", lambda first, position: position in (3, 7))

    def die_alone(number: int, ids: list[int]) -> None:
        if number >= PROOF and ids[1] == 7 and sum(one[1] == 7 for one in server.requests[PROOF:]) == 2:
            time.sleep(0.2)  # the samples before this one reach their parts
            server.dead = True

    server.on_request = die_alone
    with pytest.raises(ServerDied):
        _extract(server, lineage)
    assert list(lineage.hidden_state_shards(S0).folder.glob("part-*"))
    server.on_request, server.dead = (lambda number, ids: None), False
    (_, manifest), _ = _extract(server, lineage)
    again = [ids[1] for ids in server.requests[PROOF:]]
    assert (again.count(3), again.count(7)) == (0, 2)
    assert manifest.facts["compared_alone"] == 2


def test_the_proof_takes_samples_of_later_shards_where_the_first_has_too_few(
    server: StandIn, tmp_path: Path
) -> None:
    nothing = [invent(0, index, verdict="empty") for index in range(2)]
    lineage = audit(make_lineage(tmp_path, [nothing, _all(1)[:3], _all(2)]))
    server.on_request = lambda number, ids: Faults(nan_share=1.0) if number < PROOF else None
    with pytest.raises(QualityError, match="tried on 8 samples before any shard is made"):
        _extract(server, lineage, *lineage.recipe.shards)
    assert len({ids[1] for ids in server.requests}) == 8
    assert {ids[1] for ids in server.requests if ids[1] < 200} == {100, 101, 102}


def test_the_files_of_one_shard_after_the_other_are_looked_for(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token ids of all shards at once may be gigabytes."""
    shards = [_all(number) for number in range(4)]
    lineage = make_lineage(tmp_path, shards, while_generating=True, generation={"temperature": 0})
    for shard, samples in zip(lineage.recipe.shards, shards, strict=True):
        lineage.captured(shard).mkdir(parents=True)
        for sample in samples:
            path = lineage.captured(shard) / f"{sample.sample_id}.safetensors"
            write_states(path, sample.token_ids[:-1], LAYERS, HIDDEN, TARGET, Faults())
    planned: list[weakref.ref[PlannedSample]] = []
    held: list[int] = []
    planned_shard = run_module.planned_shard

    def watched(lineage: Lineage, shard: str) -> ShardPlan:
        plan = planned_shard(lineage, shard)
        planned.append(weakref.ref(plan.samples[0]))
        held.append(sum(one() is not None for one in planned))
        return plan

    monkeypatch.setattr(run_module, "planned_shard", watched)
    _extract(server, audit(lineage), *lineage.recipe.shards)
    assert server.opened == 0
    assert max(held[: len(shards)]) == 2


def test_only_the_samples_of_a_damaged_part_are_made_again(server: StandIn, lineage: Lineage) -> None:
    (_, before), _ = _extract(server, lineage)
    folder = lineage.hidden_state_shards(S0).folder
    parts = sorted(folder.glob("part-*"))
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    (_, after), _ = sorted(_extract(server, lineage), key=lambda told: told[0])
    assert 0 < len(server.requests[PROOF:]) < PER_SHARD
    assert (after.facts["samples"], after.facts["tokens"]) == (PER_SHARD, before.facts["tokens"])
    _holds_the_states_of(lineage, S0, _all(0))


def test_unaudited_samples_are_not_extracted(server: StandIn, tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="sample_audit"):
        _extract(server, make_lineage(tmp_path), S0)
    assert server.opened == 0


def test_layers_that_the_target_lacks_are_refused_before_anything_else(
    server: StandIn, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="more than the target's 4 layers"):
        _extract(server, make_lineage(tmp_path, layers=(1, 2, 5)), S0)


def test_progress_says_samples_tokens_and_bytes(caplog: pytest.LogCaptureFixture) -> None:
    from eagle3_pipeline.extraction.progress import Progress

    now = iter([0.0, 1.0, 6.0, 6.0, 6.0])
    progress = Progress(100, clock=lambda: next(now))
    progress.stand(10)
    with caplog.at_level(logging.INFO):
        progress.captured(300, 1 << 20)
        progress.captured(300, 1 << 20)
    assert caplog.messages == ["extraction: 12/100 samples, 100 tokens/s, 2 MiB of states, about 4 min left"]
