"""API keys: reading them, checking them before everything else, and refusing to be open to the world by accident."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

import rolloutd.client
from rolloutd.server.access import KeyCheck, is_loopback, read_api_keys
from rolloutd.server.cli import main
from rolloutd.server.config import load_config
from rolloutd.server.config_keys import ConfigError
from rolloutd.v1 import GetServerInfoRequest, ListRunsRequest, SubmitRolloutRequest, WatchRunRequest
from tests.server.harness import Details, Rig, refused, running_server, submission

KEY = "2f9c41d07be8"


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\nother-key\n")
    return str(path)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


# Reading


def test_a_file_of_keys_is_read_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf# trainers\r\n\r\n  alpha  \r\nbe#ta # of team b\n\tgamma\t#x\n#delta\n   \nepsilon")
    assert read_api_keys(str(path), "k") == ("alpha", "be#ta", "gamma", "epsilon")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no key"),
        (b"\n  \n# only a comment\n", "has no key"),
        (b"good\ntwo words\n", "line 2 of .*one word"),
        ("schlüssel\n".encode(), "line 1 of .*printable ASCII"),
        (b"ab\x00cd\n", "line 1 of .*printable ASCII"),
        (b"\xff\xfe\x00", "is not text"),
    ],
)
def test_a_bad_file_of_keys_is_named_and_never_quoted(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(flags={"server.api_keys_file": str(path)})
    assert str(raised.value).startswith("server.api_keys_file") and str(path) in str(raised.value)
    for secret in ("two words", "schlüssel", "ab\x00cd"):
        assert secret not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=f"server.api_keys_file: cannot read {path}: "):
            load_config(flags={"server.api_keys_file": str(path)})
    if os.geteuid() != 0:
        sealed = tmp_path / "sealed"
        sealed.write_text(KEY)
        sealed.chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            load_config(flags={"server.api_keys_file": str(sealed)})


# Where it listens


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "localhost.", "::ffff:127.0.0.1"]
)
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert load_config(flags={"server.host": host}).host == host


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]", "", "10.0.0.7", "::ffff:10.0.0.7", "localhost.example.org", "127.1", "node-7"]
)
def test_a_public_bind_without_keys_refuses_and_says_what_to_do(host: str, keys_file: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError) as raised:
        load_config(flags={"server.host": host})
    for advice in ("server.host (flag)", "--api-keys-file", "tls.client_ca_file", "--allow-unauthenticated"):
        assert advice in str(raised.value)
    assert load_config(flags={"server.host": host, "server.api_keys_file": keys_file}).host == host
    assert load_config(flags={"server.host": host, "server.allow_unauthenticated": True}).host == host


def test_a_public_bind_from_the_environment_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"server\.host \(env\)"):
        load_config(environment={"ROLLOUTD_SERVER__HOST": "0.0.0.0"})


def test_serve_refuses_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 1
    assert "--allow-unauthenticated" in capsys.readouterr().err


def test_no_flag_takes_a_key_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "submit", "health"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--api-key " not in capsys.readouterr().out


# Checking


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ((), "needs an API key"),
        ((("authorization", ""),), "of another kind"),
        ((("authorization", "Bearer"),), "none of this server's"),
        ((("authorization", "Bearer "),), "none of this server's"),
        ((("authorization", f"Basic {KEY}"),), "of another kind"),
        ((("authorization", KEY),), "of another kind"),
        (bearer(KEY[:-1]), "none of this server's"),
        (bearer(KEY + "0"), "none of this server's"),
        (bearer(KEY.upper()), "none of this server's"),
        (bearer("é"), "none of this server's"),
        (bearer(KEY) + bearer(KEY), "more than one"),
        ((("Authorization-key", KEY), ("x-api-key", KEY)), "needs an API key"),
        (bearer(KEY), None),
        ((("authorization", f"bearer  {KEY} "),), None),
        ((("authorization", f"Bearer {KEY}".encode()),), None),
        (bearer("other-key"), None),
    ],
)
def test_which_calls_pass(metadata: Any, problem: str | None) -> None:
    found = KeyCheck([KEY, "other-key"]).problem(metadata)
    if problem is None:
        assert found is None
    else:
        assert found is not None and problem in found
        assert KEY.lower() not in found.lower()


def test_every_key_is_compared_whether_or_not_one_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("rolloutd.server.access.hmac.compare_digest", compare)
    check = KeyCheck(["a", "bb", "c" * 100])
    assert check.problem(bearer("a")) is None and check.problem(bearer("z")) is not None
    assert compared == [(32, 32)] * 6


def test_no_keys_is_no_check() -> None:
    with pytest.raises(ValueError, match="at least one"):
        KeyCheck([])


def assert_unauthenticated(details: Details) -> None:
    assert details.code is grpc.StatusCode.UNAUTHENTICATED and details.reason == "UNAUTHENTICATED"
    assert "wrong-key" not in details.message


@pytest.mark.parametrize("metadata", [(), bearer("wrong-key")])
async def test_calls_of_every_kind_are_checked(keys_file: str, metadata: Any) -> None:
    async with running_server(engines=(), flags={"server.api_keys_file": keys_file}) as rig:
        assert_unauthenticated(await refused(rig.engines.GetServerInfo(GetServerInfoRequest(), metadata=metadata)))
        # also before the request is looked at
        assert_unauthenticated(await refused(rig.runs.ListRuns(ListRunsRequest(page_size=-1), metadata=metadata)))
        watch = rig.runs.WatchRun(WatchRunRequest(run_id="run"), metadata=metadata)
        assert_unauthenticated(await refused(watch.read()))
        silent = rig.rollouts.SubmitRollout(metadata=metadata)  # nothing is sent, and it ends all the same
        assert_unauthenticated(await refused(silent.read()))
        reflection = reflection_pb2_grpc.ServerReflectionStub(rig.channel).ServerReflectionInfo(metadata=metadata)
        assert_unauthenticated(await refused(reflection.read()))
        unknown = rig.channel.unary_unary("/rolloutd.v1.RolloutService/NoSuchMethod")
        assert_unauthenticated(await refused(unknown(b"", metadata=metadata)))
        near = rig.channel.unary_unary("/grpc.health.v1.HealthX/Check")
        assert_unauthenticated(await refused(near(b"", metadata=metadata)))
        assert not (await rig.runs.ListRuns(ListRunsRequest(), metadata=bearer(KEY))).runs  # none of it did anything


async def test_with_a_key_everything_is_as_before(keys_file: str) -> None:
    async with running_server(flags={"server.api_keys_file": keys_file}) as rig:
        for key in (KEY, "other-key"):
            await rig.engines.GetServerInfo(GetServerInfoRequest(), metadata=bearer(key))
        call = rig.rollouts.SubmitRollout(metadata=bearer(KEY))
        await call.write(
            SubmitRolloutRequest(hello={"run_id": "run", "consumer_id": "c"}, submissions=[submission("r")])
        )
        seen: list[str] = []
        while "finished" not in seen:
            message = await call.read()
            seen += [event.WhichOneof("event") for event in message.events]
        call.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(rig.channel).ServerReflectionInfo(metadata=bearer(KEY))
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await reflection.read()).list_services_response.service
        reflection.cancel()


async def test_health_needs_no_key(keys_file: str) -> None:
    async with running_server(engines=(), flags={"server.api_keys_file": keys_file}) as rig:
        stub = health_pb2_grpc.HealthStub(rig.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


# The client


def target_of(rig: Rig) -> str:
    return f"127.0.0.1:{rig.server.port}"


async def test_the_client_shows_its_key_with_every_call(keys_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_server(flags={"server.api_keys_file": keys_file}) as rig:
        options: dict[str, Any] = {"run": "run", "consumer": "c"}
        for wrong in (None, "wrong-key"):
            with pytest.raises(rolloutd.client.Unauthorized) as raised:
                async with rolloutd.client.connect(target_of(rig), api_key=wrong, **options):
                    pytest.fail("attached without a key")
            assert raised.value.reason == "UNAUTHENTICATED" and "wrong-key" not in str(raised.value)
        async with rolloutd.client.connect(target_of(rig), api_key=f" {KEY}\n", **options) as client:
            assert (await client.generate([1, 2, 3], max_new_tokens=2)).ok
            assert (await anext(client.watch_run())).run_id == "run"
            assert len(await client.run_rollout([1, 2], max_new_tokens=1)) == 1
        monkeypatch.setenv("ROLLOUTD_API_KEY", f"{KEY}\n")
        async with rolloutd.client.connect(target_of(rig), **options) as client:
            assert (await client.get_run()).run_id == "run"
        async with rolloutd.client.connect_all([target_of(rig)], **options) as several:
            assert (await several.generate([1, 2, 3], max_new_tokens=2)).ok
            assert list((await several.report_step(1)).keys()) == [target_of(rig)]


@pytest.mark.parametrize("key", ["", "  \n", "two words", "schlüssel"])
def test_a_key_that_cannot_be_one_is_refused_at_once(key: str) -> None:
    with pytest.raises(ValueError, match="api_key") as raised:
        rolloutd.client.connect("127.0.0.1:1", api_key=key)
    assert not key.strip() or key not in str(raised.value)


def test_a_client_shows_nobody_its_key() -> None:
    client = rolloutd.client.connect("127.0.0.1:1", api_key="secret-key")
    assert "secret-key" not in repr(client) + repr(client._access)


def test_submit_names_a_key_file_that_cannot_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["submit", "--run", "r", str(tmp_path / "in"), str(tmp_path / "out"), "--api-key-file"]
    assert main([*arguments, str(tmp_path / "absent")]) == 1
    assert "--api-key-file: cannot read" in capsys.readouterr().err
    (tmp_path / "empty").write_text("\n")
    assert main([*arguments, str(tmp_path / "empty")]) == 1
    assert "is empty" in capsys.readouterr().err
