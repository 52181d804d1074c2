"""Qwen3-Next in JAX and Equinox.

Axis words used in every annotation:

    batch, seq        rows and tokens of a call          slot         places of a key/value cache
    hidden, vocab     model width, vocabulary            heads        query heads; kv_heads, key_heads, value_heads
    head, key, value  width of one head                  channels     inputs of the short convolution
    experts, expert   number of experts, their width     in, out      a projection's widths
    n, chunk          number of chunks, tokens in one    layers       layers of one stack
    freq              rotated pairs of a head            rows, places assignments, before and after sorting
    batch in *batch   any leading axes                   top_k        experts of a token
"""
