// Package lifecycle makes sandboxes, and is the only owner of what state each is in: what can happen to one in which state
// is one table, transitions of one sandbox happen one after another, each with a deadline, and killing it interrupts any.
// A sandbox is a row before it is a machine. So is a member of the pool, which is a machine that is kept for a sandbox to come.
// The package knows nothing of HTTP, and of containerd only the interface Machines.
package lifecycle
