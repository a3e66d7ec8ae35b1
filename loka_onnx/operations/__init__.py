"""Operations on finished runs: compare, drift, refresh."""
