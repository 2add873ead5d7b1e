"""What a customer is about to buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shop.catalog import Catalog, Product


@dataclass
class Line:
    """A product and how many of it."""

    product: Product
    quantity: int = 1

    @property
    def total(self) -> int:
        """The price of the line in cents."""
        return self.product.price * self.quantity


class Cart:
    """The lines of one customer, in the order in which they were added."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._lines: dict[str, Line] = {}

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, code: str, quantity: int = 1) -> Line:
        """Puts a product into the cart; one that is there already becomes more."""
        if quantity < 1:
            raise ValueError(f"cannot add {quantity} of {code}")
        line = self._lines.get(code)
        if line is None:
            line = Line(self.catalog.find(code), 0)
            self._lines[code] = line
        line.quantity += quantity
        return line

    def remove(self, code: str) -> None:
        """Takes a product out of the cart, if it is there."""
        self._lines.pop(code, None)

    def clear(self) -> None:
        """Takes everything out of the cart."""
        self._lines.clear()

    @property
    def items(self) -> int:
        """How many things are in the cart."""
        return sum(line.quantity for line in self)

    @property
    def subtotal(self) -> int:
        """The price of all lines in cents, before discounts."""
        return sum(line.total for line in self)
