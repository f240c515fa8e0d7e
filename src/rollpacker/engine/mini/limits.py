"""What the built-in engine refuses before it queues a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.engine.base import Request


def check_request(request: Request, room: int, vocabulary: int) -> None:
    """Raise ``ValueError`` unless the request fits ``room`` tokens and its ids are the model's.

    The kernels do not check bounds, so an unknown id would read whatever lies behind the
    embedding.
    """
    size, most = len(request.prompt), request.params.max_tokens
    if size == 0 or size + most > room:
        raise ValueError(
            f"attempt {request.attempt}: {size} prompt + {most} response tokens "
            f"do not fit {room}: lower rollout.max_completion_length or raise engine.kv_tokens"
        )
    if len(request.generated) >= most:
        raise ValueError(f"attempt {request.attempt} has all its max_tokens already")
    for ids in (request.prompt, request.generated):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(
                f"attempt {request.attempt}: token ids must be in 0..{vocabulary - 1}: "
                "use the tokenizer that belongs to the model"
            )
