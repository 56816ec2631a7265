"""From a ticket to a scored group: the `Rollouter`, its engines and the reward stage."""
