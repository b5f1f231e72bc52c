"""LLaMA in flax: configs, programs, attention, sharding, checkpoints, tokenizers.

Shape glossary, used in comments as `# [B, T, K, H]` all over pdjax:

    B sequences (decode rows)    T tokens of a chunk      L layers       K kv heads     G query heads per kv head
    H head dim                   D model dim              F ffn dim      V vocabulary   N pages     P page size
    M pages in a block table

Nothing here knows about requests, scheduling or transfers.
"""
