package qemu

// Killpoint is where a test intervenes in a save.
var Killpoint = &killpoint
