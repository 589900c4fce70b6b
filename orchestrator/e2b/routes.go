package e2b

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Routes that need no key.
const (
	routeHealth  = "GET /health"
	routeReady   = "GET /readyz"
	routeMetrics = "GET /metrics"
)

// calls are what is done for whom has a key, by pattern.
func (s *Server) calls() map[string]func(*call) (answer, error) {
	return map[string]func(*call) (answer, error){
		"POST /sandboxes":        s.create(v1),
		"POST /v2/sandboxes":     s.create(v2),
		"GET /sandboxes":         s.listV1,
		"GET /v2/sandboxes":      s.list,
		"GET /sandboxes/metrics": s.metricsOfMany,

		"GET /sandboxes/{sandboxID}":             on(s.get),
		"DELETE /sandboxes/{sandboxID}":          on(s.kill),
		"POST /sandboxes/{sandboxID}/connect":    on(s.connect(v1)),
		"POST /v2/sandboxes/{sandboxID}/connect": on(s.connect(v2)),
		"POST /sandboxes/{sandboxID}/timeout":    on(s.setTimeout),
		"POST /sandboxes/{sandboxID}/refreshes":  on(s.refresh),
		"POST /sandboxes/{sandboxID}/pause":      on(s.pause),
		"POST /sandboxes/{sandboxID}/resume":     on(s.resume),
		"POST /sandboxes/{sandboxID}/fork":       on(s.fork),
		"POST /sandboxes/{sandboxID}/init":       on(s.initAgain),
		"POST /sandboxes/{sandboxID}/snapshots":  on(s.save),
		"POST /sandboxes/{sandboxID}/rollback":   on(s.rollback),
		"PUT /sandboxes/{sandboxID}/network":     on(s.updateNetwork),
		"GET /sandboxes/{sandboxID}/metrics":     on(s.metrics),
		"GET /sandboxes/{sandboxID}/logs":        on(s.logsV1),
		"GET /v2/sandboxes/{sandboxID}/logs":     on(s.logsV2),

		"GET /snapshots":                   s.snapshots,
		"GET /templates":                   s.listTemplatesV1,
		"GET /v2/templates":                s.listTemplates,
		"GET /templates/{templateID}":      s.getTemplate,
		"DELETE /templates/{templateID}":   s.deleteTemplate,
		"GET /templates/{templateID}/{of}": s.ofTemplate,
		"PATCH /templates/{templateID}":    s.changeTemplateV1,
		"PATCH /v2/templates/{templateID}": s.changeTemplate,
		"POST /templates/tags":             s.addTags,
		"DELETE /templates/tags":           s.removeTags,

		"POST /v3/templates":                                  s.createBuild,
		"POST /v2/templates":                                  s.createBuildV2,
		"GET /templates/{templateID}/files/{hash}":            s.uploadLink,
		"POST /v2/templates/{templateID}/builds/{buildID}":    s.startBuild,
		"GET /templates/{templateID}/builds/{buildID}/status": s.buildStatus,
		"GET /templates/{templateID}/builds/{buildID}/logs":   s.buildLogs,

		"GET /teams":    s.teams,
		"GET /capacity": s.capacity,
		// E2B has had them, and says so.
		"POST /access-tokens": func(*call) (answer, error) { return answer{}, fail(http.StatusGone, noTokens) },
	}
}

const (
	noBuilds  = "templates of a Dockerfile that the client builds aren't supported here: POST /v3/templates builds them here, as SDKs do"
	noVolumes = "volumes aren't supported here"
	noSecrets = "secrets aren't supported here"
	noKeys    = "keys are made with `cube key create`, listed with `cube key ls` and revoked with `cube key revoke`"
	noTeams   = "metrics of teams aren't supported here: GET /metrics has this machine's"
	noNodes   = "there is one node, this machine: GET /capacity, GET /readyz and GET /metrics tell of it"
	noAdmin   = "there are no administrator's calls: `cube` on this machine does what root may"
	noTokens  = "there are no access tokens, only API keys: `cube key create` makes one"
)

// unsupported are routes that E2B has, with why they aren't here: no client is to take them for things that aren't found.
var unsupported = map[string]string{
	"POST /templates":                                  noBuilds,
	"POST /templates/{templateID}":                     noBuilds,
	"POST /templates/{templateID}/builds/{buildID}":    noBuilds,
	"GET /volumes":                                     noVolumes,
	"POST /volumes":                                    noVolumes,
	"GET /volumes/{volumeID}":                          noVolumes,
	"DELETE /volumes/{volumeID}":                       noVolumes,
	"GET /secrets":                                     noSecrets,
	"POST /secrets":                                    noSecrets,
	"GET /secrets/{secretID}":                          noSecrets,
	"POST /secrets/{secretID}":                         noSecrets,
	"DELETE /secrets/{secretID}":                       noSecrets,
	"GET /api-keys":                                    noKeys,
	"POST /api-keys":                                   noKeys,
	"PATCH /api-keys/{apiKeyID}":                       noKeys,
	"DELETE /api-keys/{apiKeyID}":                      noKeys,
	"GET /teams/{teamID}/metrics":                      noTeams,
	"GET /teams/{teamID}/metrics/max":                  noTeams,
	"GET /nodes":                                       noNodes,
	"GET /nodes/{nodeID}":                              noNodes,
	"POST /nodes/{nodeID}":                             noNodes,
	"POST /admin/teams/{teamID}/sandboxes/kill":        noAdmin,
	"GET /admin/sandboxes/running-counts":              noAdmin,
	"POST /admin/teams/{teamID}/builds/cancel":         noAdmin,
	"POST /admin/teams/{teamID}/api-keys":              noAdmin,
	"DELETE /admin/teams/{teamID}/api-keys/{apiKeyID}": noAdmin,
	"DELETE /access-tokens/{accessTokenID}":            noTokens,
}

// public are what anybody may ask.
func (s *Server) public() map[string]http.Handler {
	all := prometheus.Gatherers{s.options.Metrics}
	if more := s.options.MoreMetrics; more != nil {
		all = append(all, more)
	}
	served := promhttp.HandlerFor(all, promhttp.HandlerOpts{
		// What can be told is, whatever can't.
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	})
	return map[string]http.Handler{
		routeHealth: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			_, _ = io.WriteString(w, "Health check successful") // the client has gone away
		}),
		routeReady: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			report := s.options.Ready(r.Context())
			status := http.StatusOK
			if !report.Ready {
				status = http.StatusServiceUnavailable
				w.Header().Set("Retry-After", "1")
			}
			s.send(w, status, report)
		}),
		// Ids of sandboxes are in them, which let anybody in who knows them.
		routeMetrics: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case !s.mayScrape(r):
				s.refuse(w.(*exchange), r, fail(http.StatusForbidden, "metrics aren't for this address: ask for them at 127.0.0.1, or see api.metrics_from of the configuration"))
			case !byAddress(r.Host):
				s.refuse(w.(*exchange), r, fail(http.StatusForbidden, "metrics are asked for by address, as 127.0.0.1, or at localhost, not at %s", quote(redact(r.Host))))
			default:
				served.ServeHTTP(w, r)
			}
		}),
		// Whoever has been told where may upload a file, by a link that is signed.
		"PUT /templates/{templateID}/files/{hash}": http.HandlerFunc(s.upload),
	}
}

// mayScrape tells whether a request comes from where metrics may be read, and not by way of a proxy there.
func (s *Server) mayScrape(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || r.Header.Get("X-Forwarded-For") != "" || r.Header.Get("Forwarded") != "" {
		return false
	}
	addr := from.Addr().Unmap().WithZone("")
	return slices.ContainsFunc(s.options.MetricsFrom, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// byAddress tells whether a request's host is an address, or localhost. Any other name may be somebody's who has it lead here, so
// that a browser on this machine takes the answer for that somebody's own and lets his page read it (DNS rebinding).
func byAddress(host string) bool {
	name := host
	if h, port, err := net.SplitHostPort(host); err == nil {
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return false
		}
		name = h
	}
	_, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(name, "["), "]"))
	return err == nil || strings.EqualFold(name, "localhost")
}

// teamBody is a team, with the key that it was asked for with: others can't be had.
type teamBody struct {
	TeamID    string `json:"teamID"`
	Name      string `json:"name"`
	APIKey    string `json:"apiKey"`
	IsDefault bool   `json:"isDefault"`
}

func (s *Server) teams(c *call) (answer, error) {
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return ok([]teamBody{{TeamID: c.team, Name: c.team, APIKey: c.key, IsDefault: true}}), nil
}
