"""Which backend carries a call: router.py decides, from the config and what backends declare."""
