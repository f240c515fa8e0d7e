"""What every engine over a model refuses."""

from __future__ import annotations

from rollpacker.engine.base import EngineInfo, Request


def stops_of(request: Request) -> tuple[str, ...]:
    """The strings that end it."""
    return () if request.params.ignore_stop else request.params.stop


def check_room(info: EngineInfo, longest: int) -> None:
    """Raise ``ValueError`` where a response of ``longest`` tokens fits behind no prompt at all."""
    if info.max_length <= longest:
        raise ValueError(
            f"an engine has room for {info.max_length} tokens of a sequence, not for a prompt and "
            f"{longest} of its response: raise engine.kv_tokens or lower "
            "rollout.max_completion_length"
        )


def check_request(request: Request, *, room: int, vocabulary: int, decodes: bool) -> None:
    """Raise ``ValueError`` unless it fits and its ids are the model's.

    Args:
        request: to be submitted.
        room: tokens of the longest sequence.
        vocabulary: token ids are below it; kernels do not check bounds, so an unknown id would
            read whatever lies behind the embedding.
        decodes: whether there is a tokenizer, which stop strings need.
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
    if stops_of(request) and not decodes:
        raise ValueError("rollout.stop needs the model's tokenizer")
