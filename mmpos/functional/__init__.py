"""Pure mathematics of the encodings: functions of coordinates and parameters, no modules, torch only."""
