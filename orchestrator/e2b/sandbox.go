package e2b

import (
	"time"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// sandboxBody is what a client needs to get into a sandbox.
type sandboxBody struct {
	SandboxID          string  `json:"sandboxID"`
	TemplateID         string  `json:"templateID"`
	Alias              string  `json:"alias,omitempty"`
	ClientID           string  `json:"clientID"`
	EnvdVersion        string  `json:"envdVersion"`
	EnvdAccessToken    string  `json:"envdAccessToken,omitempty"`
	TrafficAccessToken *string `json:"trafficAccessToken"`
	Domain             *string `json:"domain"`
}

func (s *Server) sandbox(sb lifecycle.Sandbox) sandboxBody {
	return sandboxBody{
		SandboxID: sb.ID, TemplateID: sb.TemplateID, Alias: sb.Alias, ClientID: clientID,
		EnvdVersion: sb.EnvdVersion, EnvdAccessToken: sb.EnvdToken, TrafficAccessToken: orNull(sb.TrafficToken), Domain: &s.options.Domain,
	}
}

// listedBody is a sandbox in a list.
type listedBody struct {
	SandboxID    string            `json:"sandboxID"`
	TemplateID   string            `json:"templateID"`
	Alias        string            `json:"alias,omitempty"`
	ClientID     string            `json:"clientID"`
	StartedAt    time.Time         `json:"startedAt"`
	EndAt        time.Time         `json:"endAt"`
	CPUCount     int               `json:"cpuCount"`
	MemoryMB     int               `json:"memoryMB"`
	DiskSizeMB   int               `json:"diskSizeMB"`
	Metadata     map[string]string `json:"metadata"`
	State        lifecycle.State   `json:"state"`
	EnvdVersion  string            `json:"envdVersion"`
	VolumeMounts []struct{}        `json:"volumeMounts"` // there are none
}

func listed(sb lifecycle.Sandbox) listedBody {
	metadata := sb.Metadata
	if metadata == nil {
		metadata = map[string]string{}
	}
	return listedBody{
		SandboxID: sb.ID, TemplateID: sb.TemplateID, Alias: sb.Alias, ClientID: clientID,
		StartedAt: sb.StartedAt.UTC(), EndAt: sb.EndAt.UTC(), CPUCount: sb.CPUs, MemoryMB: sb.MemoryMB, DiskSizeMB: sb.DiskMB,
		Metadata: metadata, State: sb.State.Shown(), EnvdVersion: sb.EnvdVersion, VolumeMounts: []struct{}{},
	}
}

// detailBody is all that is told of a sandbox.
type detailBody struct {
	listedBody
	EnvdAccessToken     string        `json:"envdAccessToken,omitempty"`
	Domain              *string       `json:"domain"`
	AllowInternetAccess *bool         `json:"allowInternetAccess"`
	Network             networkBody   `json:"network"`
	Lifecycle           lifecycleBody `json:"lifecycle"`
}

type networkBody struct {
	AllowPublicTraffic bool     `json:"allowPublicTraffic"`
	AllowOut           []string `json:"allowOut,omitempty"`
	DenyOut            []string `json:"denyOut,omitempty"`
	MaskRequestHost    string   `json:"maskRequestHost,omitempty"`
	HTTPSPorts         []int    `json:"httpsPorts,omitempty"`
}

type lifecycleBody struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"`
}

func (s *Server) detail(sb lifecycle.Sandbox) detailBody {
	d := detailBody{
		listedBody:          listed(sb),
		EnvdAccessToken:     sb.EnvdToken,
		AllowInternetAccess: sb.AllowInternet,
		Network: networkBody{
			AllowPublicTraffic: sb.Network.AllowPublicTraffic == nil || *sb.Network.AllowPublicTraffic,
			AllowOut:           sb.Network.AllowOut, DenyOut: sb.Network.DenyOut,
			MaskRequestHost: sb.Network.MaskRequestHost, HTTPSPorts: sb.Network.HTTPSPorts,
		},
		Lifecycle: lifecycleBody{AutoResume: sb.AutoResume, OnTimeout: "kill"},
	}
	if sb.AutoPause {
		d.Lifecycle.OnTimeout = "pause"
	}
	if d.State == lifecycle.Running {
		d.Domain = &s.options.Domain
	}
	return d
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
