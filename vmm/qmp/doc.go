// Package qmp speaks the QEMU Machine Protocol (docs/interop/qmp-spec in QEMU's tree) over a connected Unix socket. It
// knows the protocol, not the commands: what to say is package qemu's matter.
//
// The peer is not trusted. A QEMU that a guest has taken over can send anything at any time; it can end the session,
// but it can't block a caller beyond its context or make the client's memory grow without bound.
package qmp
