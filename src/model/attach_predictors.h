#pragma once
// A sidecar's predictors in a model's layers.
#include "model/model.h"
#include "model/sidecar.h"

namespace hearth::model {

// Gives the model's layers the predictors of a sidecar, which replace those of its own file; the sidecar's file stays
// mapped as long as the model lives. False when the sidecar holds none. Throws Error when it was made for another
// model, or holds something that is no predictor of it.
bool attach_predictors(Model& model, const Sidecar& sidecar);

}  // namespace hearth::model
