// Package api is what host and guest have in common: the agent's calls, generated from agent.proto. They travel over the
// control stream of the agent channel (package mux).
package api
