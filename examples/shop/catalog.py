"""What the shop sells."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


class UnknownProduct(LookupError):
    """A product code that is not in the catalog."""


@dataclass(frozen=True)
class Product:
    """Something to buy. Prices are in cents."""

    code: str
    name: str
    price: int
    category: str = "other"


class Catalog:
    """All products by their code."""

    def __init__(self, products: Iterable[Product] = ()) -> None:
        self._products: dict[str, Product] = {}
        for product in products:
            self.add(product)

    def __len__(self) -> int:
        return len(self._products)

    def __iter__(self) -> Iterator[Product]:
        return iter(self._products.values())

    def add(self, product: Product) -> None:
        """Adds a product, or replaces the one with its code."""
        self._products[product.code] = product

    def find(self, code: str) -> Product:
        """The product with this code. Raises `UnknownProduct`."""
        try:
            return self._products[code]
        except KeyError:
            raise UnknownProduct(code) from None

    def in_category(self, category: str) -> list[Product]:
        """The products of a category, the cheapest first."""
        products = [product for product in self if product.category == category]
        return sorted(products, key=lambda product: product.price)


def read_catalog(path: Path) -> Catalog:
    """Reads a CSV file with the columns code, name, price and category."""
    catalog = Catalog()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            product = Product(
                code=row["code"],
                name=row["name"],
                price=int(row["price"]),
                category=row["category"],
            )
            catalog.add(product)
    return catalog
