"""One layer of a decoder, as far as memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass

Matrix = tuple[int, int]
"""Outputs and inputs of a linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Numbers of weights and of values; a token mixer and an MLP are added up to a layer.

    Args:
        matrices: of the mixer's linear layers.
        feed_forward: those of MLPs that every token passes.
        expert: those of one expert, where a router chooses among experts.
        routed: how many of them a token meets.
        other: further weights: norms, biases, convolutions, routers.
        output: inputs of the mixer's last matrix.
        mixed: values of a token that the mixer keeps for its gradient, besides its input and
            ``output``.
        normed: float32 values of a token that norms keep, where they compute in it throughout.
        inner: sizes of the MLPs that a token passes, together.
        kv_heads: heads that can be shared out among devices, each of which has one at least; of a
            latent cache one.
        kv_width: values that a token leaves in the cache of each of them.
        window: most tokens of a sequence for which they are kept; 0: all.
        state: values that are kept of a sequence, however long it is.
    """

    matrices: tuple[Matrix, ...] = ()
    feed_forward: tuple[Matrix, ...] = ()
    expert: tuple[Matrix, ...] = ()
    experts: int = 0
    routed: int = 0
    other: int = 0
    output: int = 0
    mixed: int = 0
    normed: int = 0
    inner: int = 0
    kv_heads: int = 0
    kv_width: int = 0
    window: int = 0
    state: int = 0

    def __add__(self, also: DecoderLayer) -> DecoderLayer:
        """Both in one layer: at most one of them has experts, and one a cache by tokens."""
        return DecoderLayer(
            matrices=self.matrices + also.matrices,
            feed_forward=self.feed_forward + also.feed_forward,
            expert=self.expert + also.expert,
            experts=self.experts + also.experts,
            routed=self.routed + also.routed,
            other=self.other + also.other,
            output=self.output + also.output,
            mixed=self.mixed + also.mixed,
            normed=self.normed + also.normed,
            inner=self.inner + also.inner,
            kv_heads=self.kv_heads + also.kv_heads,
            kv_width=self.kv_width + also.kv_width,
            window=self.window + also.window,
            state=self.state + also.state,
        )

    @property
    def expert_weights(self) -> int:
        """Of all experts that a router chooses among."""
        return self.experts * _size(self.expert)

    @property
    def idle_weights(self) -> int:
        """Of the experts that a token does not meet."""
        return (self.experts - self.routed) * _size(self.expert)

    @property
    def linear(self) -> int:
        """Weights of all matrices."""
        return _size(self.matrices) + _size(self.feed_forward) + self.expert_weights

    @property
    def weights(self) -> int:
        """All of them."""
        return self.linear + self.other

    def cached(self, devices: int) -> int:
        """Values that a token leaves on so many devices together: where there are fewer heads,
        some are held more than once."""
        return max(devices, self.kv_heads) * self.kv_width


def _size(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)
