"""What a drive was measured to give, which way of reading that speaks for, and where the result is kept. Measures nothing.

``choose`` is pure: rates in, a ``ReadSetting`` out. One small file per device and size of record lies in the state directory
(``state_dir()/drives``), written whole and atomically; the choice is made anew from its rates each time, so the rates are the
only thing that is kept. A file that is damaged, of another version or file system, or too old counts as
none. ``shared.planning.drive_probe`` measures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from native.memory import hash64
from native.reader import ENGINES
from shared.files import read_file
from shared.kept import replace_file
from shared.wire.endpoints import state_dir

VERSION = 1
MAX_AGE_S = 30 * 86400.0
MAX_AGE_BUSY_S = 86400.0
BUSY_SPREAD = 1.5
"""Where the default's fastest and slowest round are further apart than this, something else used the drive."""
MAX_FILE_BYTES = 1 << 20
MIB = 1 << 20
WINS_BY = 1.08
"""A setting replaces the default when it is faster by this factor in the middle, and in no round slower."""
BUFFERED_WINS_BY = 1.4
"""Buffered reads cost most of a core and push other files out of the page cache: they must win clearly."""


class ReadSetting(msgspec.Struct, frozen=True, order=True):
    """How reads are done. ``depth`` pieces of ``piece_bytes`` are in flight."""

    engine: str
    is_direct: bool
    depth: int
    piece_bytes: int

    def __str__(self) -> str:
        how = "direct" if self.is_direct else "buffered"
        return f"{how} reads by {self.engine}, {self.depth} pieces of {self.piece_bytes / MIB:g} MiB in flight"


DEFAULT = ReadSetting("threads", True, 4, 2 * MIB)
BUFFERED = ReadSetting("threads", False, 4, 2 * MIB)
CANDIDATES = (
    DEFAULT,
    ReadSetting("threads", True, 2, 4 * MIB),
    ReadSetting("threads", True, 16, MIB),
    ReadSetting("uring", True, 4, 2 * MIB),
    ReadSetting("uring", True, 16, MIB),
    BUFFERED,
)
"""Few large reads (virtual drives, single disks) to many small ones (NVMe, arrays). The default comes first."""

Rates = Mapping[ReadSetting, Sequence[float]]
"""Setting -> bytes per second, one per round; a round measures all settings one after the other."""


FLUID = ("zfs", "nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "fuse")
"""File systems on a pool or on another host: their size is what is free there now."""


class Mount(msgspec.Struct, frozen=True):
    """The file system that a file lies on."""

    device: str
    """"major:minor" of the files on it."""
    fs_type: str
    mount_point: str
    fs_bytes: int
    """Its size; 0 for one that says another size whenever something is written (``FLUID``)."""

    @property
    def is_memory(self) -> bool:
        """Its files are memory already: nothing can be read past the page cache."""
        return self.fs_type in ("tmpfs", "ramfs", "hugetlbfs")


class DriveProfile(msgspec.Struct, frozen=True):
    """How to read from a drive, and why."""

    setting: ReadSetting
    note: str = ""
    """Why it was not measured, or why it is buffered."""
    rates: dict[ReadSetting, tuple[float, ...]] = {}
    measured_at: float = 0.0
    """Seconds since the epoch; 0: not measured."""

    @property
    def ceiling(self) -> float:
        """Bytes per second of the fastest setting; 0: not measured."""
        return max((statistics.median(rates) for rates in self.rates.values()), default=0.0)

    @property
    def was_busy(self) -> bool:
        """Whether something else seems to have used the drive while it was measured: soon to be measured again."""
        base = self.rates.get(DEFAULT) or next(iter(self.rates.values()), ())
        return bool(base) and max(base) > BUSY_SPREAD * min(base)


def choose(rates: Rates) -> ReadSetting:
    """The default unless another setting wins clearly. Rounds are compared pairwise, because drives drift.

    Where direct reads were not possible (no rate of one) the fastest buffered setting.
    """
    if not any(setting.is_direct for setting in rates):
        return max(rates, key=lambda s: statistics.median(rates[s]), default=BUFFERED)
    base = rates.get(DEFAULT)
    if not base:
        return DEFAULT
    best, best_gain = DEFAULT, 1.0
    for setting, found in rates.items():
        gains = [one / limit for one, limit in zip(found, base) if limit > 0]
        if not gains or min(gains) < 1.0:
            continue
        gain = statistics.median(gains)
        if gain > best_gain and gain >= (WINS_BY if setting.is_direct else BUFFERED_WINS_BY):
            best, best_gain = setting, gain
    return best


def profile_of(rates: Rates, measured_at: float) -> DriveProfile:
    """The profile that these rates speak for."""
    setting = choose(rates)
    note = ""
    if not setting.is_direct:
        is_possible = any(s.is_direct for s in rates)
        note = "direct reads are much slower here" if is_possible else "this file system has no direct reads"
    return DriveProfile(setting, note, {s: tuple(found) for s, found in rates.items()}, measured_at)


# ---- the file that is kept ------------------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    setting: ReadSetting
    rates: tuple[float, ...]


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    fs_type: str
    fs_bytes: int
    size_class: int
    measured_at: float
    rows: tuple[_Row, ...]


class _File(msgspec.Struct, frozen=True):
    format: str
    version: int
    checksum: str
    """Of ``body`` as it is encoded."""
    body: msgspec.Raw


FORMAT = "colibri drive profile"


def size_class(record_bytes: int) -> int:
    """Records of the same power of two share a result."""
    return max(record_bytes, 1).bit_length() - 1


def kept_folder() -> Path | None:
    """Where this user's results are kept; None for a user without a home: then nothing is."""
    try:
        return state_dir() / "drives"
    except RuntimeError:
        return None


def kept_path(folder: Path, mount: Mount, record_bytes: int) -> Path:
    """Where the result for records of this size on this mount lies, in ``kept_folder()``."""
    safe = "".join(c if c.isalnum() else "-" for c in f"{mount.device} {mount.fs_type}")
    return folder / f"{safe}-{1 << size_class(record_bytes)}"


def load_kept(path: Path, mount: Mount, record_bytes: int, now: float) -> tuple[DriveProfile | None, str]:
    """(what was kept, why nothing is usable or ''). No file is no reason."""
    try:
        file = msgspec.json.decode(read_file(path, MAX_FILE_BYTES), type=_File)
        if file.format != FORMAT or file.version != VERSION:
            return None, f"it is of version {file.version}, this program writes {VERSION}"
        if f"{hash64(bytes(file.body)):016x}" != file.checksum:
            return None, "its checksum is wrong"
        body = msgspec.json.decode(file.body, type=_Body)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, error.strerror or str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, "it is damaged"
    here = (mount.device, mount.fs_type, mount.fs_bytes, size_class(record_bytes))
    if (body.device, body.fs_type, body.fs_bytes, body.size_class) != here:
        return None, "it is of another file system"
    profile = profile_of({row.setting: row.rates for row in body.rows}, body.measured_at)
    if not is_usable(profile):
        return None, "its numbers are impossible"
    if not 0 <= now - body.measured_at <= (MAX_AGE_BUSY_S if profile.was_busy else MAX_AGE_S):
        return None, "it is too old" if now > body.measured_at else "it is from the future"
    return profile, ""


def is_usable(profile: DriveProfile) -> bool:
    """Whether these can be rates of a drive. What is measured is kept only if a later start would take it."""
    return bool(profile.rates) and all(_is_possible(s, rates) for s, rates in profile.rates.items())


def _is_possible(s: ReadSetting, rates: Sequence[float]) -> bool:
    return (
        s.engine in ENGINES
        and 1 <= s.depth <= 64
        and 4096 <= s.piece_bytes <= 1 << 30
        and s.piece_bytes % 4096 == 0
        and 0 < len(rates) <= 1000
        and all(math.isfinite(rate) and 0 < rate < 1e15 for rate in rates)
    )


def save_kept(path: Path, mount: Mount, record_bytes: int, profile: DriveProfile) -> None:
    """Replaces the file at once or not at all. Raises OSError."""
    rows = tuple(_Row(setting, rates) for setting, rates in profile.rates.items())
    body = msgspec.json.encode(
        _Body(mount.device, mount.fs_type, mount.fs_bytes, size_class(record_bytes), profile.measured_at, rows)
    )
    data = msgspec.json.encode(_File(FORMAT, VERSION, f"{hash64(body):016x}", msgspec.Raw(body)))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, data)
