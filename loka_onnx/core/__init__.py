"""The values that stages exchange: frozen, serializable, free of any framework."""
