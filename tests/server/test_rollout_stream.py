"""The SubmitRollout stream over a real channel."""

from __future__ import annotations

from tests.server.harness import running_server, submission


async def test_a_batch_goes_through_to_the_engine_and_back() -> None:
    async with running_server() as rig, rig.stream() as stream:
        assert stream.attached.server.limits.max_message_bytes == 64 << 20
        await stream.submit(*[submission(f"r{number}", max_new_tokens=3) for number in range(20)])
        results = await stream.finished(20)
        assert {result.rollout_id for result in results} == {f"r{number}" for number in range(20)}
        for result in results:
            assert result.complete
            assert len(result.token_bytes) == 12
            assert result.engine_id == "engine-0:1"
            assert result.run_id == "run"
            assert [(span.start, span.end) for span in result.spans] == [(0, 3)]
