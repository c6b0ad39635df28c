"""A dataset is written whole, read back as it was, and refused when it is not what it says."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cloudsched.commands.policies import make_policy
from cloudsched.datasets.check import check_dataset, require_sound
from cloudsched.datasets.manifest import (
    MANIFEST,
    Behaviour,
    checksum,
    open_part,
    read_episodes,
    read_manifest,
)
from cloudsched.datasets.record import RecordingConfig, default_behaviours, in_process, plan, record
from cloudsched.datasets.schema import arrow_schema, to_arrays, to_table
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import DatasetError
from cloudsched.evaluation import Episodes

PART = "part-00000.parquet"


def findings(folder):
    return check_dataset(folder, lambda *_: None).findings


def rows_of(folder, name=PART):
    file = open_part(folder, name, read_manifest(folder))
    return to_arrays(file.read())


def rewrite(folder, **changes):
    """Change columns of the first file, and let the manifest agree with the new file."""
    schema = pq.read_schema(folder / PART)
    rows = {k: v.copy() for k, v in to_arrays(pq.read_table(folder / PART)).items()}
    for name, change in changes.items():
        change(rows[name])
    pq.write_table(to_table(rows, schema), folder / PART)
    update_manifest(folder, lambda m: m["files"][PART].update(sha256=checksum(folder / PART)))


def update_manifest(folder, change):
    document = json.loads((folder / MANIFEST).read_text())
    change(document)
    (folder / MANIFEST).write_text(json.dumps(document))


def test_a_recorded_dataset_is_sound(recorded):
    report = check_dataset(recorded, lambda *_: None)
    assert report.findings == ()
    assert report.num_checked == report.manifest.num_decisions > 1000
    assert sum(report.manifest.action_counts.values()) == report.num_checked
    assert all(count > 0 for count in report.manifest.action_counts.values())
    assert require_sound(recorded).seeds == report.manifest.seeds


def test_every_episode_has_arrivals_of_its_own_and_no_test_or_train_seed(recorded):
    seeds = read_manifest(recorded).seeds
    assert len(set(seeds)) == len(seeds)
    assert all(50 <= seed < 1_000_000 for seed in seeds)


def test_a_policy_that_decides_alone_is_logged_as_it_is_evaluated(recorded):
    manifest = read_manifest(recorded)
    episodes = read_episodes(recorded).to_pydict()
    for i, behaviour in enumerate(episodes["behaviour"]):
        if manifest.behaviours[behaviour].name == "rr":
            run = Episodes(manifest.scenario, [episodes["seed"][i]])
            metrics = run.run(make_policy("rr", manifest.scenario.config)).metrics
            assert episodes["mean_power_w"][i] == metrics["mean_power_w"][0]
            assert episodes["decisions"][i] == metrics["decisions"][0]


def test_logged_power_cost_and_reward_add_up_to_the_episodes_measures(recorded):
    rows, episodes = rows_of(recorded), read_episodes(recorded).to_pydict()
    for e in np.unique(rows["episode"]):
        own = rows["episode"] == e
        assert rows["elapsed_ticks"][own].sum() == 60
        assert rows["power_w"][own].sum() / 60 == pytest.approx(episodes["mean_power_w"][e])
        assert rows["reward"][own].sum() == pytest.approx(episodes["episode_return"][e], rel=1e-5)
        assert rows["cost"][own].sum() >= episodes["violations"][e] - 1e-3


def test_arrays_survive_a_table(recorded):
    cluster = read_manifest(recorded).scenario.config
    rows = rows_of(recorded)
    again = to_arrays(to_table(rows, arrow_schema(cluster)))
    for name, values in rows.items():
        np.testing.assert_array_equal(again[name], values)
        assert again[name].dtype == values.dtype


def test_recording_again_gives_the_same_bits(recorded, record_again):
    assert read_manifest(record_again).to_json() == read_manifest(recorded).to_json()


def test_the_default_mix_toggles_and_never_repeats_arrivals():
    shards = plan(Scenario(), RecordingConfig())
    seeds = [seed for shard in shards for seed in shard.seeds]
    assert len(set(seeds)) == len(seeds) == RecordingConfig().num_episodes
    assert {row for shard in shards for row in shard.rows} == set(range(len(default_behaviours())))
    assert not any("@" in behaviour.policy for behaviour in default_behaviours())


@pytest.mark.parametrize("text", ["rr~x", "rr~2", "rr~-0.1"])
def test_a_behaviour_that_is_none_is_refused(text):
    with pytest.raises(DatasetError, match="POLICY~EPSILON"):
        Behaviour.parse(text)


def test_a_folder_in_use_is_not_overwritten(recorded):
    with pytest.raises(DatasetError, match="not empty"):
        record(
            Scenario(), RecordingConfig(), recorded, make_policy, lambda *_: None, {}, in_process
        )


def test_a_flipped_bit_is_found_and_nothing_is_trained(copied):
    blob = bytearray((copied / PART).read_bytes())
    blob[len(blob) // 3] ^= 1
    (copied / PART).write_bytes(blob)
    assert any("checksum differs" in finding for finding in findings(copied))
    with pytest.raises(DatasetError, match="checksum differs"):
        require_sound(copied)


def test_a_cut_file_is_found(copied):
    blob = (copied / PART).read_bytes()
    (copied / PART).write_bytes(blob[: len(blob) // 2])
    assert any("cannot be read" in finding and PART in finding for finding in findings(copied))
    with pytest.raises(DatasetError, match="cannot be read"):
        require_sound(copied)


def test_a_missing_file_is_found(copied):
    (copied / PART).unlink()
    with pytest.raises(DatasetError, match="cannot be read"):
        require_sound(copied)


def test_a_missing_column_is_named(copied):
    table = pq.read_table(copied / PART).drop_columns(["cost"])
    pq.write_table(table, copied / PART)
    with pytest.raises(DatasetError, match="column 'cost' is missing"):
        require_sound(copied)


def test_a_column_of_another_type_is_named(copied):
    table = pq.read_table(copied / PART)
    index = table.schema.get_field_index("action")
    table = table.set_column(index, "action", table["action"].cast(pa.int64()))
    pq.write_table(table, copied / PART)
    with pytest.raises(DatasetError, match="'action' has type int64, expected int32"):
        require_sound(copied)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "cloudsched.dataset.v0", "schema 'cloudsched.dataset.v0'"),
        ("encoder_version", 1, "encoder version 1"),
        ("scenario", {"preset": "nowhere"}, "damaged"),
        ("behaviours", 5, "damaged"),
        ("files", {"../x.parquet": {"rows": 1, "sha256": ""}}, "outside its folder"),
    ],
)
def test_a_foreign_manifest_is_refused(copied, key, value, message):
    update_manifest(copied, lambda document: document.update({key: value}))
    with pytest.raises(DatasetError, match=message):
        read_manifest(copied)


def test_a_folder_without_a_manifest_is_no_dataset(tmp_path):
    with pytest.raises(DatasetError, match=r"offline/record\.py"):
        read_manifest(tmp_path)


def _illegal(actions):
    actions[7] = 10_000


def _never(chances):
    chances[3] = 0.0


def _nan(costs):
    costs[11] = np.nan


def _gap(steps):
    steps[20:] += 1


def _loud(servers):
    servers[5, 0, 0] = 7.0


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("action", _illegal, "row 7: action 10000 is not in"),
        ("behaviour_probability", _never, "row 3: behaviour_probability 0.0"),
        ("cost", _nan, "row 11: cost nan is out of range"),
        ("step", _gap, "goes on at step"),
        ("servers", _loud, r"row 5: servers has values outside \[-1, 1\]"),
    ],
)
def test_a_false_row_is_found_with_its_place(copied, column, change, message):
    rewrite(copied, **{column: change})
    found = findings(copied)
    assert any(PART in finding and re.search(message, finding) for finding in found), found


def test_a_mask_that_forbids_what_was_done_is_found(copied):
    action = rows_of(copied)["action"][4]
    rewrite(copied, action_mask=lambda mask: mask.__setitem__((4, action), 0))
    assert any("row 4" in f and "not legal by its own mask" in f for f in findings(copied))
