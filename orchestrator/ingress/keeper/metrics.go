package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"google.golang.org/protobuf/proto"
)

const (
	// metricPrefix begins the names of all that a proxy tells.
	metricPrefix = "cube_ingress_"
	// metricUp is the keeper's own.
	metricUp = metricPrefix + "up"
	// maxSeries bounds what is taken of one name.
	maxSeries = 100
)

var _ prometheus.Gatherer = (*Keeper)(nil)

// Gather tells the metrics of the proxy that serves, and whether one does: that it doesn't is no error.
func (k *Keeper) Gather() ([]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(context.Background(), k.cfg.Timeout(askTimeout))
	defer cancel()
	all, err := k.metrics(ctx)
	up := 1.0
	if err != nil {
		k.log.Debug("the proxy doesn't tell its metrics", "error", err)
		up = 0
	}
	return append(all, &dto.MetricFamily{
		Name: proto.String(metricUp), Help: proto.String("Whether a proxy serves and answers."), Type: dto.MetricType_GAUGE.Enum(),
		Metric: []*dto.Metric{{Gauge: &dto.Gauge{Value: proto.Float64(up)}}},
	}), nil
}

// metrics asks the proxy that serves. It is a process without privileges that strangers talk to: nothing but its own is taken of
// what it says.
func (k *Keeper) metrics(ctx context.Context) ([]*dto.MetricFamily, error) {
	all, err := instances(ctx, k.cfg)
	if err != nil {
		return nil, err
	}
	n := slices.IndexFunc(all, func(in *instance) bool { return !in.status.Draining })
	if n < 0 {
		return nil, errors.New("no proxy serves")
	}
	text, err := all[n].client.Metrics(ctx)
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	told, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("the proxy's metrics: %w", err)
	}
	var families []*dto.MetricFamily
	for name, f := range told {
		if strings.HasPrefix(name, metricPrefix) && name != metricUp && len(f.Metric) <= maxSeries {
			families = append(families, f)
		}
	}
	return families, nil
}
