"""The server's configuration: preset < YAML file < environment < flags, merged into one frozen tree that knows its origins.

Invariants
- An unknown key is refused with a suggestion; nothing is ignored. The order of keys has no meaning.
- Every value was checked against its `KeySpec`; every error names the key and where the value came from.
- The tree carries no secret: engine keys are named by environment variable, our own keys and certificates by file, and
  read where they are used. Files are tried out here, so that what is wrong with one stops the start.
- A port that other machines reach is guarded by keys or client certificates, or the operator has said that it need not be.

What this module does not know: what the settings do.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rolloutd.scheduler.config import (
    BudgetSettings,
    DeliverySettings,
    ExecutorSettings,
    IndexSettings,
    PolicySettings,
    PreemptSettings,
    PublishSettings,
    QueueSettings,
    SchedulerConfig,
    WeightDefaults,
)
from rolloutd.scheduler.spec import Budget
from rolloutd.server.access import is_loopback, read_api_keys
from rolloutd.server.config_keys import CORE_SECTIONS, KEYS, STRUCTURED_KEYS, ConfigError
from rolloutd.server.config_rules import read_rules
from rolloutd.server.preset import preset_text
from rolloutd.server.tls import TlsSettings, check_tls

ENV_PREFIX = "ROLLOUTD_"
ENV_ENGINES = "ROLLOUTD_ENGINES"  # comma-separated; each as in --engine
ENV_PRESET = "ROLLOUTD_PRESET"
LAYERS = ("default", "preset", "file", "env", "flag")  # from weak to strong
DEFAULT_POOL = "policy"

# Settings that other systems' files carry and that would have no effect here yet.
_NOT_YET = {
    "index.max_cache_gpu_mb": (None, "is not supported yet; give the cap in tokens as index.max_cached_tokens"),
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine to connect to. Sizes of 0 are read from the engine; keys are names of environment variables."""

    url: str
    pool: str = DEFAULT_POOL
    run_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    vocabulary_size: int = 0
    slots: int = 0
    api_key_env: str = ""
    admin_api_key_env: str = ""

    @property
    def engine_id(self) -> str:
        """Derived from the URL, without its scheme: "10.0.0.7:30000"."""
        parts = urlsplit(self.url)
        return parts.netloc + parts.path.rstrip("/")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`tokenizer`: a `tokenizers` JSON file that turns text prompts of this pool into ids."""

    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class JsonLinesSettings:
    """`decision_log.*`, `lineage.*`, `event_log.*`: a file of JSON lines (`path` None: none), its size, older ones that stay."""

    path: str | None = None
    max_bytes: int = 64 << 20
    files: int = 4


@dataclass(frozen=True, slots=True)
class EngineManagerSettings:
    """`engine.*`: how engines are watched. An engine is lost after `lose_failures` failed polls over `lose_seconds`."""

    poll_seconds: float = 1.0
    register_backoff_seconds: float = 0.5
    register_backoff_max_seconds: float = 10.0
    lose_failures: int = 3
    lose_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything a server is started with. `origins`: key -> one of `LAYERS`. `source`: what it was read from, to read again."""

    host: str = "127.0.0.1"
    port: int = 50051
    engines: tuple[EngineSettings, ...] = ()
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    prometheus_port: int | None = None
    seed: int = 0
    max_message_bytes: int = 64 << 20
    keepalive_min_ping_seconds: float = 5.0
    shutdown_grace_seconds: float = 30.0
    api_keys_file: str | None = None
    allow_unauthenticated: bool = False
    tls: TlsSettings = TlsSettings()
    log_json: bool = False
    log_level: str = "info"
    decision_log: JsonLinesSettings = JsonLinesSettings()
    lineage: JsonLinesSettings = JsonLinesSettings()
    event_log: JsonLinesSettings = JsonLinesSettings()
    engine_manager: EngineManagerSettings = EngineManagerSettings()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    source: ConfigSource | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Arguments of `load_config`; of the environment only what it reads."""

    file: Path | None
    environment: Mapping[str, str]
    flags: Mapping[str, Any]

    def load(self) -> ServerConfig:
        """Read everything again. Raises ConfigError."""
        return load_config(self.file, self.environment, self.flags)


def load_config(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> ServerConfig:
    """Merge preset, file, environment and flags (dotted keys; None is "not given"). Raises ConfigError."""
    values: dict[str, Any] = {key: spec.default for key, spec in KEYS.items()}
    origins = dict.fromkeys([*KEYS, *STRUCTURED_KEYS], "default")
    values["engines"], values["pools"], values["rules"] = [], {}, []
    named = {name: text for name, text in (environment or {}).items() if _is_setting(name)}
    layers = [
        ("file", _read_file(file) if file is not None else {}),
        ("env", _read_environment(named)),
        ("flag", {key: value for key, value in (flags or {}).items() if value is not None}),
    ]
    for origin, layer in [("preset", _read_preset(layers)), *layers]:
        for key, value in layer.items():
            if key not in KEYS and key not in STRUCTURED_KEYS:
                raise ConfigError(f"unknown key {key!r} ({origin}){_suggestion(key)}")
            values[key] = value if key in STRUCTURED_KEYS else KEYS[key].parse(value, origin)
            origins[key] = origin
    for key, (neutral, problem) in _NOT_YET.items():
        if values[key] != neutral:
            raise ConfigError(f"{key} ({origins[key]}): {problem}")
    _apply_prefix_ttl_steps(values, origins)
    _apply_settled_weights(values, origins)
    return replace(_build(values, origins), source=ConfigSource(file, named, dict(flags or {})))


def _read_preset(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """What the preset says that the strongest layer names."""
    for origin, layer in reversed(layers):
        if (name := layer.get("preset")) is not None:
            name = KEYS["preset"].parse(name, origin)
            return _flat(yaml.safe_load(preset_text(name)), f"preset {name}")
        if "preset" in layer:
            break  # null: none, whatever weaker layers say
    return {}


def _apply_settled_weights(values: dict[str, Any], origins: dict[str, str]) -> None:
    """`weights.prefix` and `weights.diversity` are what phases settle at, unless `policy.stable_*_weight` is given as well."""
    for name in ("prefix", "diversity"):
        key, own = f"weights.{name}", f"policy.stable_{name}_weight"
        if LAYERS.index(origins[key]) > LAYERS.index(origins[own]):
            values[own], origins[own] = values[key], origins[key]


def _apply_prefix_ttl_steps(values: dict[str, Any], origins: dict[str, str]) -> None:
    """The name by which other systems' files know the stable phase's prefix TTL: a step publishes one version."""
    key, own = "policy.prefix_ttl_steps", "policy.stable_prefix_ttl_versions"
    if values[key] is None:
        return
    if origins[own] != "default" and values[own] != values[key]:
        raise ConfigError(
            f"{key} ({origins[key]}): is another name of {own}, which is given too ({values[own]}); give one"
        )
    values[own], origins[own] = values[key], origins[key]


def parse_engine_flag(text: str) -> dict[str, Any]:
    """`URL` or `pool=URL`, as --engine and ROLLOUTD_ENGINES take it."""
    pool, separator, url = text.partition("=")
    if separator and "://" not in pool:
        return {"url": url, "pool": pool}
    return {"url": text}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    return _flat(document, str(path))


def _flat(document: Any, name: str) -> dict[str, Any]:
    """A file's tables as dotted keys."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: the top level must be a table of sections, got {type(document).__name__}")
    flat: dict[str, Any] = {}
    _flatten(document, "", flat)
    return flat


def _flatten(table: Mapping[Any, Any], prefix: str, flat: dict[str, Any]) -> None:
    for name, value in table.items():
        if not isinstance(name, str):
            raise ConfigError(f"key {prefix}{name!r} (file): keys must be text")
        key = prefix + name
        if isinstance(value, dict) and key not in STRUCTURED_KEYS:
            _flatten(value, key + ".", flat)
        elif value is None and any(known.startswith(key + ".") for known in KEYS):
            continue  # an empty section
        elif key in flat:
            raise ConfigError(f"{key} (file): given twice")
        else:
            flat[key] = value


def _is_setting(name: str) -> bool:
    """Whether an environment variable is one of ours, and no secret: keys of clients begin with the same prefix."""
    return name in (ENV_ENGINES, ENV_PRESET) or (name.startswith(ENV_PREFIX) and "__" in name)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if name == ENV_ENGINES:
            flat["engines"] = [parse_engine_flag(part.strip()) for part in text.split(",") if part.strip()]
        elif name == ENV_PRESET:
            flat["preset"] = text or None
        else:
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            if key not in KEYS:
                raise ConfigError(f"unknown key {key!r} (environment variable {name}){_suggestion(key)}")
            try:
                flat[key] = text if KEYS[key].kind is str and text else yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{key} (environment variable {name}): cannot read {text!r}") from error
    return flat


def _suggestion(key: str) -> str:
    known = [*KEYS, *STRUCTURED_KEYS]
    section, _, name = key.rpartition(".")
    # The right name in the wrong section says more than a similar name.
    close = [candidate for candidate in known if section and candidate.rpartition(".")[2] == name][:1]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if close:
        return f"; did you mean {close[0]!r}?"
    section = key.partition(".")[0]
    siblings = sorted(name.partition(".")[2] for name in KEYS if name.startswith(section + "."))
    if siblings:
        return f"; section {section!r} has " + ", ".join(siblings)
    return "; sections are " + ", ".join(sorted({name.partition(".")[0] for name in known}))


def _build(values: dict[str, Any], origins: dict[str, str]) -> ServerConfig:
    def section(name: str) -> dict[str, Any]:
        return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(name + ".")}

    extras = {  # keys of a core section that are not fields of its dataclass
        "budget": (
            "max_gpu_memory_mb",
            "training_reserved_mb",
            "max_inference_mb",
            "max_running_rollouts",
            "max_kv_tokens",
        ),
        "index": ("max_cache_gpu_mb",),
        "policy": ("prefix_ttl_steps",),
        "executor": ("engine",),
    }
    core = {
        name: {key: value for key, value in section(name).items() if key not in extras.get(name, ())}
        for name in CORE_SECTIONS
    }
    scheduler = SchedulerConfig(
        queue=QueueSettings(**core["scheduler"]),
        weights=WeightDefaults(**core["weights"]),
        preempt=PreemptSettings(**core["preempt"]),
        policy=PolicySettings(**core["policy"]),
        budget=BudgetSettings(default=_default_budget(section("budget"), origins), **core["budget"]),
        executor=ExecutorSettings(**core["executor"]),
        publish=PublishSettings(**core["publish"]),
        delivery=DeliverySettings(**core["delivery"]),
        index=IndexSettings(**core["index"]),
        rules=read_rules(values["rules"], origins["rules"]),
    )
    manager = section("engine")
    vocabulary_size = manager.pop("vocabulary_size")
    if manager["register_backoff_max_seconds"] < manager["register_backoff_seconds"]:
        raise ConfigError("engine.register_backoff_max_seconds: must be at least engine.register_backoff_seconds")
    log = section("log")
    tls = TlsSettings(**section("tls"))
    _check_access(values, origins, tls)
    _check_record_files(values, origins)
    return ServerConfig(
        **section("server"),
        tls=tls,
        engines=_engines(values["engines"], origins["engines"], vocabulary_size),
        pools=_pools(values["pools"], origins["pools"]),
        log_json=log["json"],
        log_level=log["level"],
        decision_log=JsonLinesSettings(**section("decision_log")),
        lineage=JsonLinesSettings(**section("lineage")),
        event_log=JsonLinesSettings(**section("event_log")),
        engine_manager=EngineManagerSettings(**manager),
        scheduler=scheduler,
        values=values,
        origins=origins,
    )


def _check_access(values: Mapping[str, Any], origins: Mapping[str, str], tls: TlsSettings) -> None:
    check_tls(tls)
    keys_file, host = values["server.api_keys_file"], values["server.host"]
    if keys_file is not None:
        read_api_keys(keys_file, "server.api_keys_file")
    guarded = keys_file is not None or tls.client_ca_file is not None or values["server.allow_unauthenticated"]
    if not guarded and not is_loopback(host):
        raise ConfigError(
            f"server.host ({origins['server.host']}): other machines reach {host!r}, and anybody could submit. Name a file "
            "of keys (server.api_keys_file, or --api-keys-file FILE: one key per line) or an authority of client certificates "
            "(tls.client_ca_file); where the network itself keeps strangers out, server.allow_unauthenticated: true (or "
            "--allow-unauthenticated)"
        )


def _check_record_files(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    named: dict[Path, str] = {}
    for key in ("decision_log.path", "lineage.path", "event_log.path"):
        if values[key] is None:
            continue
        path = Path(values[key]).absolute()
        if not path.parent.is_dir():
            raise ConfigError(f"{key} ({origins[key]}): the folder of {values[key]!r} does not exist; make it first")
        if path in named:
            raise ConfigError(f"{key} ({origins[key]}): is {named[path]} too; name another file")
        named[path] = key


def _default_budget(section: Mapping[str, Any], origins: Mapping[str, str]) -> Budget:
    """The GPU's memory less what training reserves is a ceiling like max_inference_mb: the smaller holds."""
    reserved, inference = section["training_reserved_mb"], section["max_inference_mb"]
    gpu = section["max_gpu_memory_mb"]
    if gpu is not None:
        left = gpu - (reserved or 0.0)
        if left < 0:
            origin = origins["budget.training_reserved_mb"]
            raise ConfigError(
                f"budget.training_reserved_mb ({origin}): {reserved:g} is more than budget.max_gpu_memory_mb = {gpu:g}"
            )
        inference = left if inference is None else min(inference, left)
        reserved = None
    return Budget(
        max_rollouts=section["max_running_rollouts"],
        max_kv_tokens=section["max_kv_tokens"],
        training_reserved_mb=reserved,
        max_inference_mb=inference,
    )


_ENGINE_FIELDS: Mapping[str, type] = {
    "url": str,
    "pool": str,
    "run": str,
    "labels": dict,
    "vocabulary_size": int,
    "slots": int,
    "api_key_env": str,
    "admin_api_key_env": str,
}


def _engines(entries: Any, origin: str, vocabulary_size: int) -> tuple[EngineSettings, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"engines ({origin}): must be a list of URLs or tables, got {entries!r}")
    engines: list[EngineSettings] = []
    for position, entry in enumerate(entries):
        name = f"engines[{position}]"
        if isinstance(entry, str):
            entry = parse_engine_flag(entry)
        if not isinstance(entry, dict):
            raise ConfigError(f"{name} ({origin}): must be a URL or a table, got {entry!r}")
        _check_table(name, entry, _ENGINE_FIELDS, origin)
        engine = EngineSettings(
            url=check_url(f"{name}.url", entry.get("url", "")),
            pool=entry.get("pool", DEFAULT_POOL) or DEFAULT_POOL,
            run_id=entry.get("run", ""),
            labels={str(key): str(value) for key, value in entry.get("labels", {}).items()},
            vocabulary_size=entry.get("vocabulary_size", vocabulary_size),
            slots=entry.get("slots", 0),
            api_key_env=entry.get("api_key_env", ""),
            admin_api_key_env=entry.get("admin_api_key_env", ""),
        )
        if any(engine.engine_id == other.engine_id for other in engines):
            raise ConfigError(f"{name}.url ({origin}): {engine.url} is listed twice")
        engines.append(engine)
    return tuple(engines)


def _pools(table: Any, origin: str) -> dict[str, PoolSettings]:
    if not isinstance(table, dict):
        raise ConfigError(f"pools ({origin}): must be a table of pool names, got {table!r}")
    pools = {}
    for name, entry in table.items():
        entry = {} if entry is None else entry
        if not isinstance(entry, dict):
            raise ConfigError(f"pools.{name} ({origin}): must be a table, got {entry!r}")
        _check_table(f"pools.{name}", entry, {"tokenizer": str}, origin)
        tokenizer = entry.get("tokenizer", "")
        if tokenizer and not Path(tokenizer).is_file():
            raise ConfigError(f"pools.{name}.tokenizer ({origin}): no such file: {tokenizer}")
        pools[str(name)] = PoolSettings(tokenizer=tokenizer)
    return pools


def _check_table(name: str, entry: Mapping[Any, Any], fields: Mapping[str, type], origin: str) -> None:
    for key, value in entry.items():
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "it has " + ", ".join(fields)
            raise ConfigError(f"unknown key '{name}.{key}' ({origin}); {hint}")
        kind = fields[key]
        negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or isinstance(value, bool) or negative:
            noun = {str: "a text", int: "a whole number at least 0", dict: "a table"}[kind]
            raise ConfigError(f"{name}.{key} ({origin}): must be {noun}, got {value!r}")


def check_url(name: str, url: str) -> str:
    """`url` without a trailing slash, or ConfigError when it is not an http(s) URL with a host."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_valid = urlsplit(""), False
    is_base = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
    if not is_base or not port_is_valid:
        raise ConfigError(f"{name}: must be a base URL such as http://10.0.0.7:30000, got {url!r}")
    return url.rstrip("/")
