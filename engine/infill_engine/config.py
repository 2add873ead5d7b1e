"""The engine's settings, checked once. Does not know where they come from, nor which models exist."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

#: Characters that the token of `listen` has at least: so many cannot be guessed.
LEAST_TOKEN = 16


#: What `EngineConfig.decoding` may be, beside "steps:N": N passes a canvas.
DECODINGS = ("published", "sampled", "threshold", "entropy")
STEPS = re.compile(r"steps:([1-9]\d{0,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine process is told at its start. Raises `ValueError` with a line a person can act on."""

    #: "auto", the one that was chosen (`infill_engine.catalogue`), or a name that `infill_engine.models` understands.
    model: str = "auto"
    #: "auto", or a torch device such as "cpu" or "cuda:0".
    device: str = "auto"
    #: "auto", or one of the types that the model is served in, such as "int8".
    dtype: str = "auto"
    #: CPU threads of one forward pass; 0: one a physical core, up to four.
    threads: int = 0
    #: Tokens of context before and after the gap.
    prefix_tokens: int = 1024
    suffix_tokens: int = 96
    #: Pieces of other files that a canvas sees, and tokens of each, at most. On 240 held-out gaps one was worth 0.15
    #: nats a token to the base as it is, two and four no more than one.
    snippets: int = 1
    snippet_tokens: int = 256
    #: Whether what followed the same tokens elsewhere is mixed into what the model says.
    memory: bool = True
    #: Tokens proposed at most of what followed the last tokens elsewhere. The text is the same, in fewer passes.
    proposal_tokens: int = 4
    #: Masks in a group, and groups of masks in a pass, which predict the next proposal; None: as many as suit the model
    #: on its device. 0: none. The text is the same, in fewer passes.
    masks: int | None = None
    mask_groups: int | None = None
    #: The probability that a mask's token must have to be proposed.
    mask_prob: float = 0.3
    #: Of models that see both sides of a gap: what a pass makes final. "published": as their authors have it, mostly
    #: one token a pass, of which the most probable one is taken; "sampled": the same, drawn as their authors draw it;
    #: "threshold": each that is nine tenths sure; "entropy": those that are surest together.
    decoding: str = "published"
    #: Of those: passes from one in which all keys and values are computed to the next, between which those of the
    #: prefix are kept, and those of the suffix if `dual_cache`. 1: all in each, which is exact. None, of these three:
    #: as suits the device, exact on a GPU and kept on a CPU, where a pass over all takes seconds.
    refresh_passes: int | None = None
    dual_cache: bool | None = None
    #: Of those: whether a request begins with the keys and values that the last one had of the same prefix, and with
    #: those that a new one has by itself, computed ahead; no text is exactly what it would be without.
    reuse_context: bool | None = None
    #: Tokens of context encoded in one step at most; fewer on a machine that needs more than 0.1 s for them.
    chunk_tokens: int = 64
    #: Memory for encoded contexts, in MiB.
    cache_mb: int = 512
    #: Seconds without a request after which the model's memory is given back (the next request loads it, in less than
    #: a second), and after which the process ends.
    idle_release_s: float = 300.0
    idle_exit_s: float = 900.0
    #: "", or a loopback address and port, such as 127.0.0.1:8012, to serve other plugins' protocols at. Port 0: any.
    http: str = ""
    #: What callers over TCP have to send as a bearer token; "": they need none.
    api_key: str = field(default="", repr=False)
    #: "", or an address and port at which this user's editors on other machines may have the engine, with the token
    #: that they have to send, and the files of a certificate and its key: without them only a loopback address will do.
    listen: str = ""
    token: str = field(default="", repr=False)
    tls_cert: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        for name in ("model", "device", "dtype"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} must not be empty")
        for name, least in (
            ("threads", 0),
            ("prefix_tokens", 1),
            ("suffix_tokens", 0),
            ("snippets", 0),
            ("snippet_tokens", 1),
            ("proposal_tokens", 0),
            ("masks", 0),
            ("mask_groups", 0),
            ("refresh_passes", 1),
            ("chunk_tokens", 1),
            ("cache_mb", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.decoding not in DECODINGS and not STEPS.fullmatch(self.decoding):
            raise ValueError(f"decoding must be one of {', '.join(DECODINGS)}, steps:N, not {self.decoding}")
        if not 0 <= self.mask_prob <= 1:
            raise ValueError(f"mask_prob must be a probability, not {self.mask_prob}")
        for name in ("idle_release_s", "idle_exit_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        if self.http and self.http_address is None:
            raise ValueError(f"http must be a loopback address and a port, such as 127.0.0.1:8012, not {self.http}")
        if self.listen:
            self._check_listen()

    @property
    def http_address(self) -> tuple[str, int] | None:
        """`http` as an address of this machine alone and a port; None where it is not that."""
        address = _address(self.http)
        return address if address and _is_loopback(address[0]) else None

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """`listen` as an address and a port; None where it is not that."""
        return _address(self.listen)

    def _check_listen(self) -> None:
        address = self.listen_address
        if address is None:
            raise ValueError(f"listen must be an address and a port, such as 127.0.0.1:8013, not {self.listen}")
        if len(self.token) < LEAST_TOKEN:
            raise ValueError(f"listen needs a token of at least {LEAST_TOKEN} characters")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("a certificate needs its key, and a key its certificate: give both")
        if not self.tls_cert and not _is_loopback(address[0]):
            raise ValueError(f"{self.listen} can be reached by other machines: give a certificate and its key, too")


def _address(text: str) -> tuple[str, int] | None:
    try:
        parts = urlsplit(f"//{text}")
        host = ipaddress.ip_address("127.0.0.1" if parts.hostname == "localhost" else parts.hostname or "")
        named = parts.netloc == text and parts.username is None
        return (str(host), parts.port) if named and parts.port is not None else None
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
