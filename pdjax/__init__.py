"""pdjax: LLaMA serving in JAX with prefill and decode on separate device meshes."""
