"""Where policy, rollout and algorithm meet."""
