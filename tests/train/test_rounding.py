"""What is proven of norms, sums and clipping, against exact arithmetic on inputs made to break it.

Every check is a function of a kind of gradients that raises AssertionError. It is run on the real
thing, and again with the line that it guards broken.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from lap2.train import BookkeepingError, clip, gradients
from lap2.train.arena import Arena
from lap2.train.clip import Clipping
from lap2.train.gradients import Dense, Outer, Rows, Size, Tied, summed
from lap2.train.rounding import RATIO, SHARE, UNIT, rho, sum_error

from ..helpers import lengths, mp, norms, real, weighted_sum, whole

SLACK = 1 - 2.0**-23
"""Norms of numbers that do not cancel may be too small by this: clipping leaves room for more."""

STEEP = 1e5
OUTPUTS = 64


def terms(found, i):
    """The terms ``x y^T`` that the i-th example's gradient is the sum of: all x, and all y."""
    if isinstance(found, Tied):
        (x, y), (u, v) = terms(found._rows, i), terms(found._outer, i)
        if found._outer._formed:
            u, v = whole(torch.eye(x.shape[1])), v.reshape(x.shape[1], -1)
        return np.concatenate([x, u]), np.concatenate([y, v])
    if isinstance(found, Rows):
        each = torch.nn.functional.one_hot(found._index[i], found.param.shape[0])
        return whole(each), whole(found._g[i])
    if isinstance(found, Outer) and not found._formed:
        return whole(found._g[i]), whole(found._a[i])
    values = found._values if isinstance(found, Dense) else found._form()
    return whole(torch.ones(1, 1)), whole(values[i].reshape(1, -1))


def gradient(found, i):
    """The i-th example's gradient, in squared units."""
    x, y = terms(found, i)
    values, order = x.T @ y, getattr(found, "_order", None)
    if order is not None:
        sizes = [found.param.shape[dim] for dim in order]
        values = values.reshape(sizes).transpose([order.index(dim) for dim in range(len(order))])
    return values.flatten()


def size(vector, power):
    """The norm of numbers in squared units."""
    if power == 1:
        return real(sum(map(abs, vector)), 2)
    return mp.sqrt(real(sum(v * v for v in vector), 4))


def true_norm(found, i, power):
    if power == 1:
        return size(gradient(found, i), 1)
    x, y = terms(found, i)
    return mp.sqrt(real(((x @ x.T) * (y @ y.T)).sum(), 4))


def true_length(found, i, power):
    """The norms of the terms, added up."""
    x, y = terms(found, i)
    if power == 1:
        return real((np.abs(x).sum(axis=1) * np.abs(y).sum(axis=1)).sum(), 2)
    return sum(mp.sqrt(real((a @ a) * (b @ b), 4)) for a, b in zip(x, y, strict=True))


# Inputs and gradients of a layer at a few positions, (batch, positions, width).


def nearly_cancelling(batch, positions, width):
    """Pairs of positions that are nearly the same, with gradients of opposite signs."""
    c, e = 1 + torch.rand(batch, 1, 1), 0.002 + 0.006 * torch.rand(batch, 1, 1)
    pair = torch.cat([c, c * (1 + e)], dim=1).expand(-1, -1, width)
    inputs = pair.repeat(1, -(-positions // 2), 1)[:, :positions].contiguous()
    signs = (-1.0) ** torch.arange(positions).view(1, -1, 1)
    return inputs, STEEP * signs.expand(batch, -1, width)


def nearly_the_same(batch, positions, width):
    """Even nearer, down to what float64 cannot tell apart either."""
    inputs, grads = nearly_cancelling(batch, positions, width)
    e = 10 ** (-3 - 9 * torch.rand(batch, 1, 1, dtype=torch.float64))
    inputs = inputs[:, :1].double() * (1 + e * torch.arange(positions).view(1, -1, 1))
    return inputs, grads


def hardly_anything_left(batch, positions, width):
    """The last position takes away what the others add, up to what float64 can just tell."""
    inputs = 1e12 * torch.randn(batch, positions, width, dtype=torch.float64)
    inputs[:, -1] = 0.7 - inputs[:, :-1].sum(dim=1)
    return inputs, torch.ones_like(inputs)


def little_left(batch, positions, width):
    """It takes away nearly all, so that clips still decide, and not yet lengths.

    It is the same everywhere, so that what is rounded adds up.
    """
    inputs = torch.randn(batch, positions, 1)
    inputs[:, -1] = 0.1 * inputs[:, -1] - inputs[:, :-1].sum(dim=1)
    inputs = inputs.expand(-1, -1, width).contiguous()
    return inputs, torch.ones_like(inputs)


def ordinary(batch, positions, width):
    return torch.randn(batch, positions, width), torch.randn(batch, positions, width)


def tiny_and_huge(batch, positions, width):
    """Squares of the one vanish in float32, and squares of the other overflow."""
    inputs, grads = 4.5e-23 * torch.rand(batch, positions, width), torch.randn(batch, 1, width)
    inputs[:, 1:] = torch.rand(batch, max(0, positions - 1), width)
    grads = grads.repeat(1, positions, 1)
    grads[:, 0] *= 3e22
    return inputs, grads


def smallest(batch, positions, width):
    """A few of the smallest numbers there are, against the largest."""
    inputs = torch.full((batch, positions, width), 3 * 2.0**-149)
    return inputs, torch.full_like(inputs, 2e38)


def huge(batch, positions, width):
    inputs, grads = ordinary(batch, positions, width)
    return 1e19 * inputs, 1e16 * grads


def small(batch, positions, width):
    inputs, grads = ordinary(batch, positions, width)
    return 1e-19 * inputs, 1e-4 * grads


def mostly_small(batch, positions, width):
    """Each square is half a unit of the first: added one by one, all of them vanish."""
    inputs = torch.full((batch, positions, width), 2.0**-12)
    inputs[..., 0] = 1.0
    return inputs, inputs


INPUTS = (
    nearly_cancelling, nearly_the_same, little_left, hardly_anything_left, ordinary, tiny_and_huge,
    smallest, huge, small, mostly_small,
)  # fmt: skip


# Gradients of every kind, made of such inputs.


def held(a, g):
    return Dense(torch.empty(a.shape[2]), a[:, 0] * g[:, 0, :1])


def one_position(a, g):
    return inner_products(a[:, :1], g[:, :1])


def inner_products(a, g):
    found = Outer(torch.empty(g.shape[2], a.shape[2]), a, g, arena=Arena())
    found._formed, found.terms = False, a.shape[1]
    return found


def formed(a, g):
    found = inner_products(a, g[..., :3])
    found._formed, found.terms = True, 1
    return found


def in_another_order(a, g):
    """As those of a convolution, whose weight has its dimensions in another order."""
    param = torch.empty(g.shape[2], 2, a.shape[2] // 2)
    return Outer(param, a, g, arena=Arena(), order=(0, 2, 1))


def looked_up(param, grads):
    """Lookups of the first row of a table."""
    return Rows(param, torch.zeros(grads.shape[:2], dtype=torch.long), grads)


def one_row(a, g):
    return looked_up(torch.empty(3, a.shape[2]), a * g[..., :1])


def rows(a, g):
    """Two lookups of one row, and then two of another."""
    index = torch.arange(a.shape[1]) // 2 % 3
    return Rows(torch.empty(3, a.shape[2]), index.expand(len(a), -1), a * g[..., :1])


def tied(a, g):
    """The lookup takes away what the first position adds."""
    use = inner_products(a, g[..., :3])
    return Tied(looked_up(use.param, -a[:, :1] * g[:, :1, :1]), use)


def tied_with_a_sum(a, _):
    """The lookup takes away all that many positions add, up to what is rounded."""
    g = torch.zeros_like(a[..., :3])
    g[..., 0] = 1
    use = Outer(torch.empty(3, a.shape[2]), a, g, arena=Arena())
    assert use._formed
    total = a.double().sum(dim=1, keepdim=True).to(a.dtype)
    return Tied(looked_up(use.param, -total), use)


def used_twice(a, g):
    half = a.shape[1] // 2
    return summed(
        [inner_products(a[:, :half], g[:, :half]), inner_products(a[:, half:], g[:, half:])]
    )


def looked_up_twice(a, g):
    found = rows(a, g)
    parts = (slice(None, 1), slice(1, None))
    return summed([Rows(found.param, found._index[:, p], found._g[:, p]) for p in parts])


def tied_and_used_twice(a, g):
    found = tied(a, g)
    return summed([found._outer, found._rows, inner_products(a[:, :1], g[:, :1, :3])])


def of_several_kinds(a, g):
    use = inner_products(a, g[..., :3])
    return summed([Dense(use.param, a[:, :1].expand(-1, 3, -1)), use])


KINDS = (
    held, one_position, inner_products, formed, in_another_order, one_row, rows, tied, used_twice,
    looked_up_twice, tied_and_used_twice, of_several_kinds,
)  # fmt: skip
CANCELLING = (
    inner_products, in_another_order, one_row, tied, used_twice, looked_up_twice,
    tied_and_used_twice,
)  # fmt: skip
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def made(kind, inputs, dtype, *, batch=2, positions=2, width=16):
    """Gradients of a kind, as far from ordinary numbers as the type goes."""
    a, g = (t.double() for t in inputs(batch, positions, width))
    if dtype == torch.float64 and inputs in {tiny_and_huge, smallest}:
        a, g = a * 2.0**-700, g * 2.0**700
    if dtype == torch.float16:
        a, g = a.clamp(-50, 50), g.clamp(-50, 50)
    return kind(a.to(dtype), g[..., :OUTPUTS].to(dtype))


def check_size(kind, *, inputs=INPUTS, types=TYPES, shapes=((5, 16), (2, 250)), power=2):
    """Norms and lengths are no smaller than they are, and not much larger than they need be."""
    torch.manual_seed(0)
    # What is tied is at first taken apart: then more is allowed for what may cancel.
    extra = 0.15 if "tied" in kind.__name__ or power == 1 else 1e-5
    for given, dtype, (positions, width) in itertools.product(inputs, types, shapes):
        found = made(kind, given, dtype, batch=1, positions=positions, width=width)
        bounds = norms(found, power).tolist(), lengths(found, power).tolist()
        for i, (norm, length) in enumerate(zip(*bounds, strict=True)):
            case = given.__name__, dtype, positions, width, i
            true, long = true_norm(found, i, power), true_length(found, i, power)
            assert true * SLACK <= norm < math.inf, case
            assert long * SLACK <= length < math.inf, case
            assert norm <= 1.01 * true + extra * long + 1e-100, case
            # What is formed remembers the terms it was formed of, which may be far longer.
            assert length <= 1.1 * long + 1e-100 or getattr(found, "_formed", False), case


def check_wide(kind, **settings):
    """Where inner products in float32 lose what is left of terms that nearly cancel."""
    wide = {"inputs": (nearly_cancelling,), "types": (torch.float32,), "shapes": ((2, 4096),) * 6}
    check_size(kind, **wide | settings)


def check_abs_size(kind):
    """The same for l1 norms."""
    check_size(kind, power=1, shapes=((5, 16), (4, 16), (6, 16), (2, 50)))


def check_sum(kind):
    """Sums err by no more than a unit for each term, in proportion to what is added up."""
    torch.manual_seed(0)
    for given, dtype in itertools.product(INPUTS, TYPES[:2]):
        found = made(kind, given, dtype, batch=6, positions=4)
        weights = torch.rand(6, dtype=torch.float64) * 10.0 ** torch.randint(-8, 8, (6,))
        unit = whole(torch.ones(()).double()).item()
        computed = whole(weighted_sum(found, weights).flatten()) * unit**2
        factors = whole(weights)
        exact = sum(factors[i] * gradient(found, i) for i in range(6))
        added = sum(real(factors[i]) * true_length(found, i, 2) for i in range(6))
        error = mp.sqrt(real(((computed - exact) ** 2).sum(), 6))
        assert error <= UNIT * (6 * found.terms + 64) * added, (given.__name__, dtype)
        assert added > 0


def clipped(members, bound, *, power=2, scale=1.0, total=None):
    """One group of gradients with what they are multiplied with."""
    group = tuple(member.param for member in members)
    size = len(members[0].explicit())
    clipping = Clipping((group,), (bound,), power, torch.float64, 1)
    (found,) = clipping.clip(members, scale, size=size, total=total or size)
    return found


def check_clip(kind, *, power=2, bound=0.7):
    """No record's contribution is longer than its clip, nor are its terms longer than allowed."""
    torch.manual_seed(0)
    for given, dtype, scale in itertools.product(INPUTS, TYPES[:2], (1.0, 7.0)):
        found = made(kind, given, dtype, positions=5, batch=3)
        members = [found, Dense(torch.empty(9), 1e-3 * torch.randn(3, 9))]
        weights = clipped(members, bound, power=power, scale=scale).weights
        for i, weight in enumerate(whole(weights)):
            both = np.concatenate([gradient(member, i) for member in members])
            contribution = size(both, power) * real(weight)
            long = sum(true_length(member, i, power) for member in members) * real(weight)
            assert contribution <= bound, (given.__name__, dtype, scale, i)
            assert long <= 2 * RATIO * bound
            if scale * size(both, power) >= bound and long < RATIO * bound / 2 and power == 2:
                may_cancel = getattr(found, "_formed", False) or "tied" in kind.__name__
                assert contribution >= 0.98 * bound or may_cancel


def check_abs_clip(kind):
    """The same for l1 norms."""
    check_clip(kind, power=1)


def check_neighbours(kind):
    """Any record less, and the computed sum is at most the clip and its rounding away."""
    torch.manual_seed(0)
    for given in INPUTS:
        found = made(kind, given, torch.float32, positions=3, batch=5)
        group = clipped([found], 1.0)
        sums = []
        for without in range(6):
            weights = group.weights.clone()
            weights[without : without + 1] = 0.0
            sums.append(whole(weighted_sum(found, weights).flatten()))
        for one in sums[:-1]:
            distance = mp.sqrt(real(((one - sums[-1]) ** 2).sum(), 2))
            assert distance <= 1 + mp.mpf(rho(records=5, processes=1)), given.__name__


CHECKS = (check_size, check_abs_size, check_sum, check_clip, check_abs_clip, check_neighbours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS)
def test_every_kind_of_gradient_keeps_what_is_proven(check, kind):
    check(kind)


@pytest.mark.parametrize("kind", CANCELLING)
def test_wide_layers_hide_no_norm(kind):
    check_wide(kind)
    check_wide(kind, types=(torch.float64, torch.bfloat16), shapes=((2, 1024),))
    check_wide(kind, inputs=(nearly_the_same,), types=TYPES[:2], shapes=((2, 1024),) * 2)


def test_nor_do_the_widest():
    check_wide(inner_products, shapes=((2, 16384), (4, 16384)))


def check_sums_that_are_taken_away(kind):
    check_size(kind, inputs=(nearly_cancelling,), types=TYPES[:1], shapes=((64, 4),) * 30)


def test_a_sum_that_a_lookup_takes_away_is_not_rounded():
    check_sums_that_are_taken_away(tied_with_a_sum)


def test_what_is_not_finite_contributes_nothing():
    found = made(inner_products, ordinary, torch.float32, positions=3, batch=5)
    other = Dense(torch.empty(4), torch.randn(5, 4))
    found._a[1, 0, 0], other._values[3, 2] = math.nan, math.inf
    group = clipped([found, other], 1.0)
    assert group.finite.tolist() == [True, False, True, False, True]
    for member in group.members:
        kept = group.finite[:, None] * member.explicit().double().flatten(1)
        expected = (group.weights[:, None] * kept).sum(dim=0)
        torch.testing.assert_close(weighted_sum(member, group.weights).flatten(), expected)


def summed_in_pieces(kind, *, batches, positions):
    """A sum that grows by one record for each of many pieces, then by less than half a unit."""
    one = torch.ones(1, positions, 1, dtype=torch.float64)
    half_unit = batches / 2 * 0.98 * UNIT
    large = kind(one, one / positions)
    less = kind(one, one * half_unit)
    total, weight = torch.zeros(large.param.shape, dtype=torch.float64), torch.ones(1).double()
    for found in (large, less):
        for _ in range(batches // 2):
            found.add_to(total, weight)
    return float(abs(total.flatten()[0] - batches / 2 * (1 + positions * half_unit)))


@pytest.mark.parametrize("kind", [inner_products, one_row])
@pytest.mark.parametrize("positions", [1, 64])
def test_what_many_pieces_add_up_to_is_as_near_as_is_proven(kind, positions):
    """The sum so far is rounded at each position of a later piece, not once for each piece."""
    error = summed_in_pieces(kind, batches=4096, positions=positions)
    proven = sum_error(size=1, terms=positions, total=4096, processes=1)
    assert proven / 1000 < error <= proven


def test_a_batch_whose_sum_is_not_certain_is_refused():
    found = made(inner_products, ordinary, torch.float32, positions=8)
    assert sum_error(size=2, terms=8, total=10**5, processes=1) <= SHARE
    clipped([found], 1.0, total=10**5)
    with pytest.raises(BookkeepingError, match="make max_physical_batch_size smaller"):
        clipped([found], 1.0, total=10**8)


def without_slack(inner, lengths, _additions):
    return Size(inner.clamp_min(0.0).sqrt(), lengths)


def in_float32(method):
    return lambda self, power, _: method(self, power, torch.float32)


def added_in_float32(method):
    def add_to(self, total, weights):
        narrow = torch.zeros_like(total, dtype=torch.float32)
        method(self, narrow, weights.float())
        total += narrow

    return add_to


def without_lengths(method):
    def size(self, power, dtype):
        found = method(self, power, dtype)
        return found._replace(lengths=torch.zeros_like(found.lengths))

    return size


MISTAKES = (
    (check_size, one_row, gradients, "_upper", without_slack),
    (check_size, inner_products, gradients, "_eps", lambda _: 0.0),
    (
        check_size,
        one_position,
        gradients,
        "_shift",
        lambda a, _: torch.zeros_like(a[..., :1]).int(),
    ),
    (check_size, held, Dense, "size", in_float32(Dense.size)),
    (check_size, formed, Outer, "size", in_float32(Outer.size)),
    (check_size, one_position, Outer, "size", in_float32(Outer.size)),
    (check_size, used_twice, Outer, "size", in_float32(Outer.size)),
    (check_size, rows, Rows, "size", in_float32(Rows.size)),
    (check_size, tied, Tied, "size", in_float32(Tied.size)),
    (check_size, inner_products, Outer, "size", without_lengths(Outer.size)),
    (check_abs_size, inner_products, gradients, "_eps", lambda _: 0.0),
    (check_sum, held, Dense, "add_to", added_in_float32(Dense.add_to)),
    (check_sum, inner_products, Outer, "add_to", added_in_float32(Outer.add_to)),
    (check_sum, rows, Rows, "add_to", added_in_float32(Rows.add_to)),
    (check_clip, inner_products, clip, "SHRINK", 1 + 2.0**-23),
    (check_clip, inner_products, clip, "RATIO", math.inf),
    (check_neighbours, one_position, clip, "SHRINK", 1.01),
)


@pytest.mark.parametrize(("check", "kind", "owner", "name", "mistake"), MISTAKES)
def test_the_check_fails_on_the_mistake(check, kind, owner, name, mistake):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, mistake)
        with pytest.raises(AssertionError):
            check(kind)
