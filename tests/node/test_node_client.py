"""The Node client: its own tests, its package, its README's example and a killed server, against `rolloutd serve`."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from tests.e2e.conftest import MakeServer, MakeSim, engines_ready

HERE = Path(__file__).parent
SECONDS = 60.0
EXAMPLE_LINES = 40
ROLLOUTS = 64


def run(*command: str, cwd: Path) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def linked(client: Path, folder: Path) -> Path:
    """A folder in which `import 'rolloutd'` finds the client."""
    (folder / "node_modules").mkdir()
    (folder / "node_modules/rolloutd").symlink_to(client, target_is_directory=True)
    return folder


def test_its_own_tests(npm_client: Path) -> None:
    files = [f"test/{path.name}" for path in sorted((npm_client / "test").glob("*.test.js"))]
    output = run("node", "--test", "--test-reporter=tap", "--test-timeout=30000", *files, cwd=npm_client)
    assert "# fail 0" in output
    passed = re.search(r"^# pass (\d+)$", output, re.MULTILINE)
    assert passed is not None and int(passed[1]) > 20


def test_the_lock_names_no_registry(npm_client: Path) -> None:
    packages = json.loads((npm_client / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert [name for name, package in packages.items() if "resolved" in package] == []
    assert all("integrity" in package for name, package in packages.items() if name)


def test_the_package_carries_contract_and_types_and_can_be_used_from_typescript(
    npm_client: Path, tmp_path: Path
) -> None:
    packed = json.loads(run("npm", "pack", "--json", "--silent", "--pack-destination", str(tmp_path), cwd=npm_client))
    run("tar", "-xf", packed[0]["filename"], cwd=tmp_path)
    package = tmp_path / "package"
    contract = {path.name for path in (npm_client.parents[1] / "proto/rolloutd/v1").glob("*.proto")}
    assert {path.name for path in (package / "proto/rolloutd/v1").iterdir()} == contract
    assert {"package.json", "README.md", "proto", "src", "types"} == {path.name for path in package.iterdir()}

    (package / "node_modules").symlink_to(npm_client / "node_modules", target_is_directory=True)
    user = tmp_path / "user"
    user.mkdir()
    linked(package, user)
    (user / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (user / "user.ts").write_text((HERE / "user.ts").read_text(encoding="utf-8"), encoding="utf-8")
    compiler = str(npm_client / "node_modules/.bin/tsc")
    flags = ["--strict", "--noEmit", "--module", "nodenext", "--lib", "es2023,esnext.disposable"]
    types = ["--types", "node", "--typeRoots", str(npm_client / "node_modules/@types")]
    run(compiler, *flags, *types, "user.ts", cwd=user)
    assert "function" in run("node", "-e", "import('rolloutd').then((m) => console.log(typeof m.connect))", cwd=user)


async def test_the_readme_example(npm_client: Path, tmp_path: Path, sim: MakeSim, serve: MakeServer) -> None:
    blocks = re.findall(r"^```js\n(.*?)^```$", (npm_client / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 1 and len(blocks[0].splitlines()) < EXAMPLE_LINES
    (linked(npm_client, tmp_path) / "example.mjs").write_text(blocks[0], encoding="utf-8")
    server = await serve(sim(), sim())
    process = await asyncio.create_subprocess_exec(
        "node",
        "example.mjs",
        server.target,
        "2",
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0, err.decode()
    lines = out.decode().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 0: 256 samples", "step 1: 256 samples"]
    assert all(int(line.split()[-2]) > 256 for line in lines)


async def test_a_killed_server_costs_no_result_and_repeats_none(
    npm_client: Path, tmp_path: Path, sim: MakeSim, serve: MakeServer
) -> None:
    """Killed twice: the memory of the server is gone each time, and the client submits again what it is still owed."""
    (linked(npm_client, tmp_path) / "trainer.mjs").write_text((HERE / "trainer.mjs").read_text("utf-8"), "utf-8")
    engine = sim()
    server = await serve(engine)
    process = await asyncio.create_subprocess_exec(
        "node", "trainer.mjs", server.target, str(ROLLOUTS), cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            seen: list[str] = []
            for _ in range(2):
                seen += [(await process.stdout.readline()).decode().strip() for _ in range(8)]
                server.kill()
                server.start()
                await engines_ready(server.target, 1)
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    seen += out.decode().splitlines()
    wanted = {f"r{index} completed {tokens}": 1 for index, tokens in enumerate(trainer_tokens())}
    assert Counter(seen) == Counter(wanted)


def trainer_tokens() -> list[int]:
    """Lengths that trainer.mjs asks for, rising, so that results keep coming while the server is killed."""
    return [20 + 20 * index for index in range(ROLLOUTS)]
