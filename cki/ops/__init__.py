"""The operations: each family's file holds its public functions, its OpSpecs and its planners."""
