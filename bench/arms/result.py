"""The result of a rollout that a control arm served: the fields that a trainer looks at, and what the others are then.

What this module does not know: arms.
"""

from __future__ import annotations

from rolloutd.scheduler.result import Piece, RolloutResult, Span
from rolloutd.scheduler.spec import TOKEN_BYTES, RolloutSpec
from rolloutd.scheduler.states import Outcome, RolloutClass


def completed(
    run_id: str, spec: RolloutSpec, piece: Piece, engine_id: str, attempts: int, times: tuple[float, float, float]
) -> RolloutResult:
    """times: when it was submitted, first dispatched, and now, in seconds."""
    submitted, started, now = times
    tokens = len(piece.token_bytes) // TOKEN_BYTES
    return RolloutResult(
        run_id=run_id,
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        sample_index=0,
        session_id=spec.session_id,
        turn=spec.turn,
        step=spec.needed_by_step,
        rollout_class=RolloutClass.CRITICAL if spec.rollout_class is None else spec.rollout_class,
        task_type=spec.task_type,
        stratum=spec.stratum,
        outcome=Outcome.COMPLETED,
        error=None,
        token_bytes=piece.token_bytes,
        logprob_bytes=piece.logprob_bytes,
        top_logprobs=(),
        text="",
        prompt_token_bytes=b"",
        prompt_logprob_bytes=piece.prompt_logprob_bytes,
        finish_reason=piece.finish_reason,
        matched_stop=piece.matched_stop,
        spans=(Span(0, "", 0, tokens, engine_id, attempts),),
        engine_id=engine_id,
        batch_id=0,
        attempts=attempts,
        preemptions=0,
        prompt_tokens=piece.prompt_tokens,
        cached_tokens=piece.cached_tokens,
        predicted_cached_tokens=0,
        generated_tokens=tokens,
        queued_seconds=started - submitted,
        first_token_seconds=0.0,
        running_seconds=now - started,
        total_seconds=now - submitted,
        prompt_hash="",
        complete=piece.finish_reason != "abort",
        clipped=False,
        extras={},
    )
