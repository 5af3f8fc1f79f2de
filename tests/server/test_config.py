"""Configuration: layers, origins, and errors that name the key."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.server.config import EngineSettings, load_config
from rolloutd.server.config_keys import ConfigError

# A configuration of the usual keys, as another system's file would carry it.
TABLE: dict[str, dict[str, Any]] = {
    "scheduler": {"max_batch_size": 32, "scheduling_interval_ms": 10, "queue_capacity": 4096},
    "weights": {"prefix": 0.4, "critical": 0.4, "waiting": 0.2, "diversity": 0.1, "cost": 0.1},
    "budget": {"max_gpu_memory_mb": None, "training_reserved_mb": None, "max_inference_mb": None},
    "index": {"max_bytes": 1 << 30, "eviction": "lru", "max_cache_gpu_mb": None},
    "policy": {
        "cold_start_steps": 200,
        "cold_start_prefix_weight": 0.1,
        "stable_prefix_weight": 0.4,
        "prefix_ttl_steps": 0,
    },
    "executor": {"engine": "sglang", "timeout_seconds": 120},
}


def _write(path: Path, document: Any) -> Path:
    file = path / "rolloutd.yaml"
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    return file


def test_without_anything_every_default_is_the_cores() -> None:
    config = load_config()
    assert config.scheduler == SchedulerConfig()
    assert config.host == "127.0.0.1"
    assert set(config.origins.values()) == {"default"}


def test_the_design_table_loads_as_it_is(tmp_path: Path) -> None:
    assert load_config(_write(tmp_path, TABLE)).scheduler == SchedulerConfig()


def test_the_order_of_keys_has_no_meaning(tmp_path: Path) -> None:
    document = {
        **TABLE,
        "weights": {"prefix": 0, "waiting": 1},
        "engines": [{"url": "http://a:1", "pool": "reward", "labels": {"zone": "x"}}, "http://b:1"],
        "server": {"port": 1234},
    }
    expected = load_config(_write(tmp_path, document))
    rng = random.Random(7)
    for _ in range(20):
        shuffled = {}
        for section in rng.sample(list(document), len(document)):
            body = document[section]
            shuffled[section] = (
                {key: body[key] for key in rng.sample(list(body), len(body))} if isinstance(body, dict) else body
            )
        assert load_config(_write(tmp_path, shuffled)) == expected
    assert expected.scheduler.weights.prefix == 0.0
    assert expected.scheduler.weights.critical == 0.4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights.prefix", -1),
        ("weights.prefix", "a lot"),
        ("weights.prefix", "0.4"),
        ("weights.prefix", True),
        ("weights.prefix", float("nan")),
        ("weights.prefix", float("inf")),
        ("weights.prefix", None),
        ("scheduler.max_batch_size", 0),
        ("scheduler.max_batch_size", 1.5),
        ("scheduler.scheduling_interval_ms", 0),
        ("policy.stable_tail_fill", 1.5),
        ("index.eviction", "random"),
        ("executor.engine", "vllm"),
        ("executor.max_attempts", 0),
        ("server.port", 70_000),
        ("log.level", "loud"),
        ("preempt.enabled", "yes please"),
        ("policy.prefix_ttl_steps", -1),
        ("policy.cold_start_prefix_ttl_versions", 0.5),
        ("publish.flush_tries", 0),
        ("lineage.max_bytes", 10),
        ("lineage.path", "missing-folder/lineage.jsonl"),
        ("index.max_cache_gpu_mb", 100.0),
    ],
)
def test_a_bad_value_names_its_key_and_origin(tmp_path: Path, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=rf"^{key} \(file\): "):
        load_config(_write(tmp_path, {section: {name: value}}))


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("scheduler.max_batchsize", "scheduler.max_batch_size"),
        ("weights.prefx", "weights.prefix"),
        ("scheduler.timeout_seconds", "executor.timeout_seconds"),
        ("engine", "engines"),
        ("budget.nonsense", "max_kv_tokens"),
        ("zebra", "sections are"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(tmp_path: Path, key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}' .*{suggestion}"):
        load_config(_write(tmp_path, f"{key}: 1\n"))


def test_flags_beat_environment_beats_file_and_origins_tell(tmp_path: Path) -> None:
    file = _write(tmp_path, {"server": {"port": 1, "host": "::1", "seed": 1}, "weights.prefix": 0.1})
    environment = {"ROLLOUTD_SERVER__PORT": "2", "ROLLOUTD_SERVER__SEED": "2", "ROLLOUTD_SKIP_SGLANG": "1"}
    config = load_config(file, environment, {"server.seed": 3, "server.host": None})
    assert (config.host, config.port, config.seed) == ("::1", 2, 3)
    assert config.scheduler.weights.prefix == 0.1
    assert [config.origins[f"server.{name}"] for name in ("host", "port", "seed")] == ["file", "env", "flag"]
    assert config.origins["weights.cost"] == "default"


def test_an_unknown_environment_variable_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="ROLLOUTD_WEIGHTS__PREFX.*weights.prefix"):
        load_config(environment={"ROLLOUTD_WEIGHTS__PREFX": "1"})


def test_engines_by_flag_and_environment() -> None:
    config = load_config(flags={"engines": ["http://a:1/", "reward=http://b:1"], "engine.vocabulary_size": 7})
    assert config.engines == (
        EngineSettings("http://a:1", vocabulary_size=7),
        EngineSettings("http://b:1", pool="reward", vocabulary_size=7),
    )
    assert config.engines[0].engine_id == "a:1"
    from_environment = load_config(environment={"ROLLOUTD_ENGINES": "http://a:1, reward=http://b:1"})
    assert [engine.pool for engine in from_environment.engines] == ["policy", "reward"]


@pytest.mark.parametrize(
    ("engines", "problem"),
    [
        (["ftp://a"], r"engines\[0\].url"),
        (["http://a:1", "http://a:1/"], "listed twice"),
        ([{"url": "http://a:1", "lables": {}}], "labels"),
        ([{"url": "http://a:1", "slots": -1}], r"engines\[0\].slots"),
        ("http://a:1", "must be a list"),
    ],
)
def test_a_bad_engine_entry_is_named(engines: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(flags={"engines": engines})


def test_memory_keys_become_the_default_budget() -> None:
    flags = {
        "budget.max_gpu_memory_mb": 80_000,
        "budget.training_reserved_mb": 30_000,
        "budget.max_inference_mb": 60_000,
    }
    budget = load_config(flags=flags).scheduler.budget.default
    assert budget.max_inference_mb == 50_000.0
    assert budget.training_reserved_mb is None
    reserved_only = load_config(flags={"budget.training_reserved_mb": 100}).scheduler.budget.default
    assert reserved_only.training_reserved_mb == 100.0
    with pytest.raises(ConfigError, match=r"budget.training_reserved_mb \(flag\): 9000 is more than"):
        load_config(flags={"budget.max_gpu_memory_mb": 8000, "budget.training_reserved_mb": 9000})


def test_prefix_ttl_steps_is_another_name_of_the_stable_phases_versions() -> None:
    named_so = load_config(flags={"policy.prefix_ttl_steps": 5})
    assert named_so.scheduler.policy.stable_prefix_ttl_versions == 5
    assert named_so.scheduler.policy.cold_start_prefix_ttl_versions == 0
    assert named_so.origins["policy.stable_prefix_ttl_versions"] == "flag"
    same = {"policy.prefix_ttl_steps": 5, "policy.stable_prefix_ttl_versions": 5}
    assert load_config(flags=same).scheduler == named_so.scheduler
    with pytest.raises(ConfigError, match=r"policy.prefix_ttl_steps \(flag\): is another name of .* give one"):
        load_config(flags={"policy.prefix_ttl_steps": 5, "policy.stable_prefix_ttl_versions": 6})


def test_two_logs_do_not_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "lines.jsonl")
    assert load_config(flags={"lineage.path": path, "lineage.files": 2}).lineage.files == 2
    with pytest.raises(ConfigError, match=r"lineage.path \(flag\): is decision_log.path too"):
        load_config(flags={"lineage.path": path, "decision_log.path": path})


def test_a_pool_needs_a_tokenizer_file_that_exists() -> None:
    with pytest.raises(ConfigError, match=r"pools.policy.tokenizer \(flag\): no such file"):
        load_config(flags={"pools": {"policy": {"tokenizer": "missing.json"}}})


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "1: 2\n"])
def test_a_file_that_is_no_table_of_sections_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(_write(tmp_path, text))


def test_the_same_key_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="server.port .*twice"):
        load_config(_write(tmp_path, "server: {port: 1}\nserver.port: 2\n"))
