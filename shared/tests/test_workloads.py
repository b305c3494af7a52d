import pytest

from cake_shared import workloads
from cake_shared.workloads import GDN, HEAD_PROJECTIONS, PROJECTIONS, ROUTERS, gdn_workload

PUBLISHED_TOKENS = [
    *(16384, 12761, 32768, 30115, 65536, 64420, 16384, 16384, 65536, 16384),
    *(261987, 259174, 241817, 262144, 32768, 32768, 32768, 32768, 32768),
]


def test_gdn_packs_have_the_published_tokens_and_offsets():
    assert [w.tokens for w in GDN] == PUBLISHED_TOKENS
    for w in GDN:
        assert w.cu_seqlens[0] == 0
        assert w.cu_seqlens[-1] == w.tokens
        assert w.hv % w.h == 0
    assert GDN[1].cu_seqlens == (0, 4253, 8350, 12761)


def test_names_with_heads_are_unique():
    assert len({(w.name, w.hv) for w in GDN}) == len(GDN) == 19
    for group in (PROJECTIONS, HEAD_PROJECTIONS, ROUTERS):
        assert len({w.name for w in group}) == len(group)
    assert len(PROJECTIONS) == 33
    assert len(HEAD_PROJECTIONS) == 6


def test_lookup_by_name():
    assert gdn_workload("8 x 4096").seqlens_tokens == (4096,) * 8
    assert gdn_workload("4 x 4096", hv=32).h == 16
    with pytest.raises(ValueError, match=r"2 workloads fit, with hv \[16, 32\]"):
        gdn_workload("4 x 4096")
    with pytest.raises(ValueError, match="no workload fits"):
        gdn_workload("nonsense")


def test_workloads_are_values():
    with pytest.raises(AttributeError):
        GDN[0].h = 3
    assert hash(GDN[0]) == hash(workloads.GdnWorkload("4 x 4096", 8, 16, (4096,) * 4))
