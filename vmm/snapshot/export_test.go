package snapshot

// Killpoint is where a test intervenes.
var Killpoint = &killpoint

// Sum signs a description.
var Sum = sum
