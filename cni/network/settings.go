package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
)

// Own is the name of the network that pods have which Cube itself opens, for as long as they have a machine. No network of
// CNI's can be called so: none can close them, or collect them.
const Own = "@cube"

// ownIfName is what the guest calls its card.
const ownIfName = "eth0"

// Settings are what whoever makes a pod says of its network, where no CNI plugin is to open it.
type Settings struct {
	// Policy is what the pod may reach; nil: nothing.
	Policy *policy.Policy `json:"policy,omitempty"`
	// TX and RX limit bytes from and to the pod.
	TX bpf.Rate `json:"tx,omitzero"`
	RX bpf.Rate `json:"rx,omitzero"`
	// Ports of the host lead to the pod.
	Ports []Port `json:"ports,omitempty"`
}

// ParseSettings reads settings in JSON; errdefs.ErrInvalidArgument for what it doesn't know. Whether the policy's entries
// can be had is Open's to say.
func ParseSettings(b []byte) (*Settings, error) {
	s := &Settings{}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err := d.Decode(s)
	if err == nil {
		if _, more := d.Token(); more != io.EOF {
			err = errors.New("there is something after the object")
		}
	}
	if errdefs.IsInvalidArgument(err) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("network settings: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return s, nil
}

// Request is what Open is to be asked for a pod with these settings, which has claimed its place.
func (s *Settings) Request(p Pod) Request {
	return Request{ID: p.cniID(), Network: Own, IfName: ownIfName, Policy: s.Policy, TX: s.TX, RX: s.RX, Ports: s.Ports}
}
