// Package daemon is what of the sandboxes' network runs as long as `cube up` does: it brings the network up, keeps taps ready
// and idle flows few, answers name lookups, has the network follow the host's devices, routes and addresses, puts in order
// what others take apart of it, and remembers the last drops. None of it is in the packets' way: what is open stays open, and
// what is closed closed, while no daemon runs and when the next one takes over. What ends with it is name lookups, and what
// comes to ports of the host that are mapped.
//
// It answers requests below /network/ on the control socket, which is root's. Opening and closing are not among them: package
// network does those in any process.
package daemon
