package config

import (
	"fmt"
	"net/netip"
	"net/url"
	"time"
)

// API is where E2B's SDKs ask for sandboxes.
type API struct {
	// Listen is the address and port, for plain HTTP.
	Listen netip.AddrPort `toml:"listen"`
	// MaxTimeout is the longest that a sandbox may run at a stretch; 0 = any.
	MaxTimeout Duration `toml:"max_timeout"`
	// MaxBatch is how many items one batch may have.
	MaxBatch int `toml:"max_batch"`
	// MetricsFrom are the clients that may read GET /metrics, by address.
	MetricsFrom []netip.Prefix `toml:"metrics_from"`
	// MetricsInterval is how often sandboxes are asked what they use; 0 = when somebody wants to know.
	MetricsInterval Duration `toml:"metrics_interval"`
	// Traces is where traces are sent by OTLP over HTTP, for example "http://127.0.0.1:4318"; "" = nowhere.
	Traces string `toml:"traces"`
}

func defaultAPI() API {
	return API{
		Listen:          netip.MustParseAddrPort("127.0.0.1:3000"),
		MaxBatch:        1000,
		MetricsFrom:     []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")},
		MetricsInterval: Duration(5 * time.Second),
	}
}

func (a *API) validate() error {
	traces, err := url.Parse(a.Traces)
	switch {
	case a.Listen.Port() == 0:
		return fmt.Errorf("api.listen = %q must be an address with a port, for example 127.0.0.1:3000", a.Listen)
	case a.MaxTimeout < 0 || a.MaxTimeout > 0 && time.Duration(a.MaxTimeout) < time.Second:
		return fmt.Errorf("api.max_timeout = %q must be 0 or at least a second", time.Duration(a.MaxTimeout))
	case a.MaxBatch < 1 || a.MaxBatch > 100_000:
		return fmt.Errorf("api.max_batch = %d must be between 1 and 100000", a.MaxBatch)
	case a.MetricsInterval != 0 && time.Duration(a.MetricsInterval) < time.Second:
		return fmt.Errorf("api.metrics_interval = %q must be 0 or at least a second", time.Duration(a.MetricsInterval))
	case a.Traces != "" && (err != nil || traces.Scheme != "http" && traces.Scheme != "https" || traces.Host == ""):
		return fmt.Errorf("api.traces = %q must be an http or https URL, for example http://127.0.0.1:4318", a.Traces)
	}
	return nil
}
