"""What a cart costs: discounts, shipping and tax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shop.cart import Cart

#: Cents; a cart worth more is shipped for free.
FREE_SHIPPING_FROM = 5000
SHIPPING = 495
#: Percent.
TAX = 19


class Discount(Protocol):
    """Something that makes a cart cheaper."""

    def amount(self, cart: Cart) -> int:
        """Cents taken off the price of the cart."""
        ...


@dataclass(frozen=True)
class PercentOff:
    """A part of the subtotal, once it is high enough."""

    percent: int
    minimum: int = 0

    def amount(self, cart: Cart) -> int:
        if cart.subtotal < self.minimum:
            return 0
        return cart.subtotal * self.percent // 100


@dataclass(frozen=True)
class CategoryOff:
    """A part of the price of everything in one category."""

    category: str
    percent: int

    def amount(self, cart: Cart) -> int:
        total = 0
        for line in cart:
            if line.product.category == self.category:
                total += line.total
        return total * self.percent // 100


@dataclass(frozen=True)
class Price:
    """What a customer pays, in cents. The tax is a part of the total."""

    subtotal: int
    discount: int
    shipping: int

    @property
    def total(self) -> int:
        return self.subtotal - self.discount + self.shipping

    @property
    def tax(self) -> int:
        return self.total * TAX // (100 + TAX)


def price(cart: Cart, discounts: list[Discount]) -> Price:
    """The price of a cart with the best one of the discounts."""
    subtotal = cart.subtotal
    discount = max((discount.amount(cart) for discount in discounts), default=0)
    free = not cart or subtotal - discount >= FREE_SHIPPING_FROM
    shipping = 0 if free else SHIPPING
    return Price(subtotal, discount, shipping)
