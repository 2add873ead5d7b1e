"""A small shop: what it sells, what is in a cart, what that costs, and the receipt."""
