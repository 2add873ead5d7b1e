"""The receipt as text."""

from __future__ import annotations

from shop.cart import Cart
from shop.pricing import Discount, price

WIDTH = 40


def money(cents: int) -> str:
    """An amount as people write it: 12.50."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02}"


def row(label: str, cents: int) -> str:
    """A label at the left and an amount at the right."""
    amount = money(cents)
    return label[: WIDTH - len(amount) - 1].ljust(WIDTH - len(amount)) + amount


def receipt(cart: Cart, discounts: list[Discount]) -> str:
    """All lines of the cart, what is added and taken off, and the total."""
    cost = price(cart, discounts)
    rows = []
    for line in cart:
        rows.append(row(f"{line.quantity} x {line.product.name}", line.total))
    rows.append("-" * WIDTH)
    rows.append(row("Subtotal", cost.subtotal))
    if cost.discount:
        rows.append(row("Discount", -cost.discount))
    if cost.shipping:
        rows.append(row("Shipping", cost.shipping))
    rows.append(row("Total", cost.total))
    rows.append(row("Tax included", cost.tax))
    return "\n".join(rows)
