"""What a backend is: its declaration, its reasons, and the methods that dispatch calls.

`Capabilities` is the one declaration that everything reads: dispatch, errors, `explain`, the
suite's expectations and the documentation's matrix. It stands below `plugin`, which re-exports it
as the contract, so that the array base class can build on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from attnx.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnx._call import Call, CallClass
    from attnx._lane import Lane

__all__ = [
    "MASK_KINDS", "Backend", "Capabilities", "Far", "Gradients", "Ranking", "Reason", "mask_kinds",
]  # fmt: skip

MASK_KINDS = frozenset(
    {
        "causal",
        "window",
        "lengths",
        "starts",
        "prefix",
        "segments",
        "blocks",
        "dense",
        "predicate",
        "positions",
        "or",
        "not",
    }
)
"""Every kind of mask a backend can declare; `positions` are explicit q_pos and kv_pos."""


def mask_kinds(structure: str | None) -> frozenset[str]:
    """The kinds a mask's structure holds.

    Example:
        >>> sorted(mask_kinds("((causal[top_left]|prefix)&lengths[kv])"))
        ['causal', 'lengths', 'or', 'prefix']
    """
    if structure is None:
        return frozenset()
    import re

    words = set(re.findall(r"[a-z]+(?=[\[&|)]|$)", re.sub(r"\[[^]]*\]", "[", structure)))
    words |= {"or"} if "|" in structure else set()
    words |= {"not"} if "~" in structure else set()
    words |= {"positions"} if "pos]" in structure else set()
    return frozenset(words)


class Reason(NamedTuple):
    """Why a backend cannot do a call: one lacking option.

    Attributes:
        option: the argument, as the API names it.
        got: what the call asks for.
        supported: what the backend has.
        hint: what to do instead, or "".
    """

    option: str
    got: str
    supported: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.option}={self.got} (has {self.supported})"
        return f"{text}; {self.hint}" if self.hint else text


class Ranking(NamedTuple):
    """An order of backends with what `explain` is to say of it; `attnx_rank` may give one.

    Attributes:
        order: names, the first choice first; those that cannot do the call are passed over.
        why: a few words on how the order was found, or "".
        notes: by name, what is known of a backend for this class of calls.
    """

    order: Sequence[str]
    why: str = ""
    notes: Mapping[str, str] | None = None


class Far(NamedTuple):
    """Another framework's backend, as `Lane.bridge` gets it; it compares by value.

    Attributes:
        name: the backend's name.
        forward: as `Backend.forward`; like `backward`, it takes and gives concrete arrays.
        backward: as `Backend.backward`.
        lacking: why it has no gradient here; empty where it has one.
    """

    name: str
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Gradients]
    lacking: tuple[Reason, ...] = ()

    def refuse(self, *reasons: Reason) -> NoReturn:
        """Say why not, as dispatch would."""
        raise UnsupportedError.because(self.name, *reasons)


class Gradients(NamedTuple):
    """Gradients, each in its input's shape and dtype; None without that input (S6)."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    sinks: Any = None


class Capabilities(NamedTuple):
    """What a backend declares that it can do.

    Attributes:
        dtypes: of q, k and v.
        devices: kinds of device, `"cpu"`, `"cuda"`.
        masks: kinds of mask it honours (`MASK_KINDS`).
        native_masks: those whose structure saves it work, where the others go through dense tiles.
        gqa: grouped heads.
        bias: additive bias.
        alibi: a bias that is an `Alibi`, without an array of it.
        softcap: logit softcap.
        sinks: attention sinks.
        dropout: the dropout of S9.
        lse: lse can be returned.
        gradient: it gives gradients at all; the next three refine it.
        bias_gradient: gradient of bias.
        sinks_gradient: gradient of sinks.
        lse_gradient: gradients flow through lse.
        isolation: `"full"` (S4.2) or `"unseen"` (S4.1 alone).
        higher_order: gradients of gradients.
        forward_mode: forward-mode differentiation.
        vmap: the framework's vmap.
        compile: the framework's compiler (`torch.compile`, `jax.jit`).
        deterministic: the same bits every time.
        max_head_size: the greatest D and Dv, or None.
        scores: `"float32"` when scores are kept in float32 at least, `"input"` when in q's dtype.
        scale: another scale than 1/sqrt(D).
    """

    dtypes: frozenset[str]
    devices: frozenset[str] = frozenset({"cpu"})
    masks: frozenset[str] = MASK_KINDS
    native_masks: frozenset[str] = frozenset()
    gqa: bool = True
    bias: bool = True
    alibi: bool = False
    softcap: bool = True
    sinks: bool = True
    dropout: bool = False
    lse: bool = True
    gradient: bool = True
    bias_gradient: bool = True
    sinks_gradient: bool = True
    lse_gradient: bool = True
    isolation: str = "full"
    higher_order: bool = False
    forward_mode: bool = False
    vmap: bool = False
    compile: bool = False
    deterministic: bool = False
    max_head_size: int | None = None
    scores: str = "float32"
    scale: bool = True

    def reasons(self, cls: CallClass) -> tuple[Reason, ...]:
        """One `Reason` for each thing a class of calls asks for and this does not declare."""
        found = []
        if cls.dtype not in self.dtypes:
            found.append(Reason("dtype", cls.dtype, _words(self.dtypes)))
        if cls.device.split(":")[0] not in self.devices:
            found.append(
                Reason("device", cls.device, _words(self.devices), "move the arrays there")
            )
        if cls.alibi and not self.alibi:
            hint = "pass -slopes[:, None, None] * |p - j| as an array" if self.bias else ""
            found.append(Reason("bias", "Alibi", "arrays" if self.bias else "none", hint))
        lacking = mask_kinds(cls.mask) - self.masks
        if lacking:
            found.append(Reason("mask", _words(lacking), _words(self.masks)))
        if cls.scale_sign is not None and not self.scale:
            hint = "multiply q by what it differs"
            found.append(Reason("scale", "given", "1/sqrt(D)", hint))
        if self.max_head_size is not None and max(cls.D, cls.Dv) > self.max_head_size:
            got = f"D={cls.D}, Dv={cls.Dv}"
            found.append(Reason("head size", got, f"at most {self.max_head_size}"))
        asked = {
            "gqa": cls.grouped,
            "bias": cls.bias is not None,
            "softcap": cls.softcap,
            "sinks": cls.sinks is not None,
            "dropout": cls.dropout,
            "lse": cls.need_lse and cls.gradient != "vjp",
            "gradient": cls.gradient is not None,
            "bias_gradient": cls.gradient is not None and cls.bias is not None,
            "sinks_gradient": cls.gradient is not None and cls.sinks is not None,
        }
        names = {"gqa": "grouped heads", "lse": "return_lse"}
        found += [
            Reason(names.get(option, option.replace("_", " ")), "given", "none")
            for option, wanted in asked.items()
            if wanted and not getattr(self, option)
        ]
        return tuple(found)


def _words(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"


class Backend:
    """The base of every backend.

    A backend gets q (B, Hq, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, Dv) of its own framework and a
    checked `Call`; layouts, ranks and exchange are dealt with around it.

    Attributes:
        name: as registered.
        lane: the lane of the framework it computes in.
        capabilities: the one declaration.
    """

    name: str
    lane: Lane
    capabilities: Capabilities

    def devices(self) -> tuple[str, ...]:
        """The devices that can compute here and now."""
        return ("cpu",)

    def no_device(self) -> str:
        """Why `devices` is empty, in a few words."""
        return "no device here"

    def version(self) -> str:
        """The framework's version."""
        return str(getattr(self.lane.xp, "__version__", "?"))

    def reasons(self, cls: CallClass) -> tuple[Reason, ...]:
        """Why it cannot do a class of calls; empty when it can."""
        return self.capabilities.reasons(cls)

    def route(self, cls: CallClass) -> str:
        """The name of the kernel route that a class of calls takes, for `explain`."""
        return type(self).__name__

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """The answer, without a look at differentiation.

        Returns:
            out (B, Hq, Lq, Dv) of q's dtype, and lse (B, Hq, Lq) in float32 (float64 for float64
            inputs); lse may be None unless `call.need_lse`.
        """
        raise NotImplementedError

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """The gradients for cotangents d_out and d_lse (which may be None)."""
        raise UnsupportedError(
            f"backend {self.name!r} has no backward",
            backend=self.name,
            reasons=(Reason("gradient", "given", "none"),),
        )

    def apply(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """What `attention` runs: `forward`, with the framework's differentiation attached."""
        return self.forward(q, k, v, call)

    def direct(self, cls: CallClass) -> Callable[..., Any] | None:
        """A shortcut for plain calls of a class: no mask object, bias, softcap, sinks or lse.

        Returns:
            `run(q, k, v, scale, scores)`, which gives out, or None to leave the call to
            `apply`; `scale` may be None and `scores` is B * Hq * Lq * Lk. Or None: no shortcut.
            It meets every plain call of these shapes whose `Lane.fast_key` is the class's: what
            only `Lane.late_key` tells apart, such as a gradient, it looks at itself, and declines.
        """
        return None

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """P of S2.5, (B, Hq, Lq, Lk) in q's dtype: one-hot values, a tile of keys at a time."""
        raise UnsupportedError(
            f"backend {self.name!r} does not give attention weights",
            backend=self.name,
            reasons=(Reason("attention_weights", "asked", "none"),),
        )
