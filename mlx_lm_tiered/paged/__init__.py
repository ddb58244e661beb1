"""Paged KV: keys and values of all requests in blocks of one pool, which prefixes share. Imported only with ``--paged-kv``."""
