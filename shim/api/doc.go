// Package api is what a shim answers beside containerd's own services, on the same socket: ttrpc, generated from
// snapshot.proto.
package api
