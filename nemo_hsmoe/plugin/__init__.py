"""The NeMo 2.0 adapter: the only room, with `recipes`, that imports nemo, nemo_run or lightning."""

from nemo_hsmoe.plugin import compat
from nemo_hsmoe.runtime import cpu

cpu.install()
compat.install()
